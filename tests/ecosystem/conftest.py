"""Settings of tests with other libraries' models and loops."""

from tests.spreading import spread

__all__ = ["spread"]
