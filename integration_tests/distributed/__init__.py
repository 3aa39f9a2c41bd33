"""More than one device: tensor, pipeline and data parallel, over processes and over Ray."""
