"""`python -m blockdiag`: demo and doctor."""

import importlib.util
import sys


def main() -> None:
    """Runs the command line, or says what to install for it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"python -m blockdiag needs {' and '.join(missing)}; try: pip install 'blockdiag-attn[cli]'")
    from blockdiag.cli.app import app

    app()


if __name__ == "__main__":
    main()
