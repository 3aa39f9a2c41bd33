"""Test only: a Triton backend for TRITON_INTERPRET=1, where there is none for this machine.

With the folder above on PYTHONPATH, Triton finds it in every process, an executor's workers
included. vLLM's model runner V2 then runs on a CPU; V1 must not see it, for it would use kernels.
"""
