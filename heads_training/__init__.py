"""Makes head checkpoints: prompts, answers by the target, training, evaluation.

May import `vllm_bpd.config`, `vllm_bpd.heads` and `vllm_bpd.checkpoint` (which never import
vLLM); the plugin never imports this package.
"""
