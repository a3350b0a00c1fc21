from tests.component.conftest import service

__all__ = ["service"]  # the real gRPC server on a free port
