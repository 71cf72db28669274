"""Test harness: what the GPU wheels of vLLM and SGLang lack on a machine without a GPU."""
