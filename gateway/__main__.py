"""``python -m gateway``: one gateway of a mesh."""

from gateway.service import serve
from mesh.service import run_service

if __name__ == "__main__":
    run_service("gateway", serve)
