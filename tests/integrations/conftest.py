"""Settings of tests of integrations."""

from tests.spreading import spread

__all__ = ["spread"]
