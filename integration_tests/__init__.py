"""Real-engine tests: every supported vLLM release and model runner, on a CPU."""
