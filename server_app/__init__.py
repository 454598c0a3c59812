"""The Flower ServerApp, which hands the grid to the library."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fed_dpsd.engines.flower import server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration asks for."""
    client_app = Path(__file__).resolve().parents[1] / "client_app" / "__init__.py"
    server.serve(grid, context.run_config, client_app)
