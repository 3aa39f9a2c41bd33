"""What the real-engine tests stand on: releases, engine processes, targets, stand-in heads."""
