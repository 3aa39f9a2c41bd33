"""A Triton compiler that compiles nothing: with TRITON_INTERPRET=1 kernels are interpreted."""

from typing import Any

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):  # type: ignore[misc]
    """Triton wants one beside each driver."""

    @staticmethod
    def supports_target(target: Any) -> bool:  # noqa: ARG004
        """No target."""
        return False

    def hash(self) -> str:
        """Never asked."""
        raise NotImplementedError

    def parse_options(self, options: Any) -> Any:
        """Never asked."""
        raise NotImplementedError

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> None:
        """Never asked."""
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        """Never asked."""
        raise NotImplementedError

    def get_module_map(self) -> Any:
        """Never asked."""
        raise NotImplementedError
