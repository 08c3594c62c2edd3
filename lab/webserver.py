"""The site mirror's server: a folder over HTTP. Run in the background by lab.mirror."""

from __future__ import annotations

import argparse
import html
import logging
import time
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger


def make_app(root: Path) -> web.Application:
    """Return the server: files with ranges and ETags, folders as an HTML list of links.

    Args:
        root: the folder served as ``/``; links in it may lead out of it.
    """

    async def serve(request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.match_info["path"].split("/") if part]
        if ".." in parts:
            raise web.HTTPNotFound
        path = root.joinpath(*parts)
        if path.is_file():
            return web.FileResponse(path, chunk_size=1 << 20)
        if not path.is_dir():
            raise web.HTTPNotFound
        if not request.path.endswith("/"):
            raise web.HTTPMovedPermanently(request.path + "/")
        return web.Response(text=index_page(path), content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", serve)
    return app


def index_page(folder: Path) -> str:
    """Return a folder's entries as an HTML page of relative links, as pip's --find-links reads."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    links = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a><br>\n' for name in names)
    return f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n"


class AccessLine(AbstractAccessLogger):
    """One line a request: time, client, method, path, status, bytes sent, Range header or "-".

    The bytes are those that went out, headers included, and 0 when the client broke off."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Write the line; aiohttp calls it when the response has ended, also early."""
        asked = request.headers.get("Range", "-")
        self.logger.info(
            f"{_now()} {request.remote} {request.method} {request.path} "
            f"{response.status} {response.body_length} {asked}"
        )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="Serve a folder over HTTP.")
    parser.add_argument("--root", type=Path, required=True, help="the folder served as /")
    parser.add_argument("--address", required=True, help="the address to listen on")
    parser.add_argument("--port", type=int, required=True, help="the TCP port to listen on")
    parser.add_argument("--access-log", type=Path, required=True, help="one line a request")
    asked = parser.parse_args()
    logging.basicConfig(filename=asked.access_log, level=logging.INFO, format="%(message)s")
    logging.getLogger("aiohttp").setLevel(logging.ERROR)
    web.run_app(
        make_app(asked.root),
        host=asked.address,
        port=asked.port,
        access_log=logging.getLogger("access"),
        access_log_class=AccessLine,
        print=None,
    )


if __name__ == "__main__":
    main()
