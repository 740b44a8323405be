"""The command ``shardgate``, which is ``python -m app`` too."""

import gc


def main() -> None:
    """Import all that there is, and run the command.

    Nothing of that ever is garbage, and to look for some took a third of the start.
    """
    gc.disable()
    from app.cli import main as run  # noqa: PLC0415 - what takes so long

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
