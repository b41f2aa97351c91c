"""One module a subcommand of ``moemesh``."""
