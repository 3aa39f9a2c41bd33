"""The tiny target and its answers, which heads are trained on in tests."""

from tests.heads_training.conftest import tiny_answers, tiny_records, tiny_target

__all__ = ["tiny_answers", "tiny_records", "tiny_target"]
