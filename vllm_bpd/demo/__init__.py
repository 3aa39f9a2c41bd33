"""`make demo`: the same prompts without speculation and with `bpd`, side by side."""
