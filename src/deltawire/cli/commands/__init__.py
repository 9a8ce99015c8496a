"""One module per subcommand of `deltawire`. `cli/__init__.py` lists them and groups them for `--help`."""
