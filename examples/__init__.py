"""Programs to start from: blockwise heads in Ray's LLM libraries."""
