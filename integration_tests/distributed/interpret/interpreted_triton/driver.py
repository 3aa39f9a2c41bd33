"""A Triton driver that says it is active: with TRITON_INTERPRET=1 none is needed."""

from typing import Any

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):  # type: ignore[misc]
    """Nothing of it but `is_active` is ever asked."""

    @classmethod
    def is_active(cls) -> bool:
        """Always."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Never asked."""
        raise NotImplementedError

    def get_current_target(self) -> Any:
        """Never asked."""
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        """Never asked."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Never asked."""
        raise NotImplementedError
