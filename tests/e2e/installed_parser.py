"""Parses YAML files of options with the installed vLLM's parser; prints each one's exit code."""

import contextlib
import io
import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm")
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
for path in sys.argv[1:]:
    code: object = 0
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parser.parse_args(["serve", "/model", "--config", path])
    except SystemExit as end:
        code = end.code
    print(path, code)
