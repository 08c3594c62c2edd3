"""Texts as they land on hosts: golden files, and what each program reads back out of them.

The golden files under tests/data/golden/<host>/<path> are what `fp8fleet render
inventories/prod.py` writes for three hosts. After a change that is meant, write them anew and
review the difference:

    FP8FLEET_UPDATE_GOLDEN=1 pytest tests/unit/test_render.py
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import INSTANCE, REPO, Site, file_text
from matrices import BRIDGED

from fp8fleet import render
from fp8fleet.catalog import OptionFacts, option_tables, serve_options
from fp8fleet.manifest import load_manifest
from fp8fleet.plan import FleetPlan, HostPlan
from fp8fleet.spec import OWNED_OPTIONS
from lab.site import cache_dir

GOLDEN = REPO / "tests/data/golden"
GOLDEN_HOSTS = ["gpu-h100-1", "gpu-kylin-1", "gw-1"]
GOLDEN_ROLES = ("host", "vllm", "nginx")
NGINX = "/etc/nginx/nginx.conf"
UNIT = "/etc/systemd/system/fp8fleet-main.service"

PIECES = [
    '"',
    "'",
    "\\",
    "$HOME",
    "${X}",
    "`id`",
    "#",
    "%n",
    "=",
    ";",
    " ",
    "\t",
    "é",
    "模型",
    "😀",
]
PIECES += [
    "\\n",
    '\\"',
    "$(id)",
    "a",
    "Z",
    "0",
    "-",
    ": ",
    "- ",
    "!x",
    "&a",
    "*a",
    "@",
    "~",
    "[",
    "{",
]


def texts(seed: int, count: int = 60) -> list[str]:
    """Random one-line texts out of what parsers trip over; the same for the same seed."""
    source = random.Random(seed)
    return ["".join(source.choices(PIECES, k=source.randint(0, 8))) for _ in range(count)]


# Golden files


def golden_files(host: HostPlan) -> dict[str, bytes]:
    """The files of a host that are compared: those that are rendered, not locks and archives."""
    return {file.path: file.content for file in host.files if file.role in GOLDEN_ROLES}


@pytest.mark.parametrize("name", GOLDEN_HOSTS)
def test_the_rendered_files_are_the_golden_ones(prod: FleetPlan, name: str) -> None:
    folder = GOLDEN / name
    now = golden_files(prod.hosts[name])
    if os.environ.get("FP8FLEET_UPDATE_GOLDEN"):
        shutil.rmtree(folder, ignore_errors=True)
        for path, content in now.items():
            target = folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    stored = {
        f"/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert sorted(stored) == sorted(now)
    for path, content in now.items():
        assert content.decode() == stored[path].decode(), path


def test_the_golden_files_hold_placeholders_and_no_secret() -> None:
    text = (GOLDEN / "gpu-h100-1/etc/fp8fleet/instances/left.key").read_text()
    assert text == "<secret FP8FLEET_API_KEY>\n"


# Environment files


def systemd_environment(text: str) -> dict[str, str]:
    """Variables of an EnvironmentFile by systemd's rules for the form ``NAME="value"``.

    Inside double quotes a backslash takes ``"``, ``\\``, backtick and ``$`` literally and is itself
    kept before anything else (systemd.exec(5), EnvironmentFile=). Nothing is expanded.
    """
    variables = {}
    for line in text.splitlines():
        if line.startswith(("#", ";")) or not line.strip():
            continue
        match = re.fullmatch(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"', line)
        assert match, line
        variables[match[1]] = re.sub(r'\\(["\\`$])', r"\1", match[2])
    return variables


@pytest.mark.parametrize("seed", range(5))
def test_systemd_reads_back_the_variables_that_were_meant(seed: int) -> None:
    variables = {f"V{number}": text for number, text in enumerate(texts(seed))}
    assert systemd_environment(render.environment_text(variables)) == variables


@pytest.mark.parametrize("seed", range(5))
def test_a_shell_reads_back_the_same_variables(seed: int, tmp_path: Path) -> None:
    """sh's rules inside double quotes are the same, so a real program checks ours."""
    variables = {f"V{number}": text for number, text in enumerate(texts(seed, 20))}
    file = tmp_path / "env"
    file.write_text(render.environment_text(variables), encoding="utf-8")
    show = "; ".join(f"printf '%s\\0' \"${name}\"" for name in variables)
    run = subprocess.run(["sh", "-c", f". {file}; {show}"], capture_output=True, check=True)
    assert run.stdout.decode().split("\0")[:-1] == list(variables.values())


def test_a_variable_of_the_inventory_arrives_whatever_it_holds(site: Site) -> None:
    found = [text for text in texts(7, 40) if "\t" not in text]  # control characters are refused
    assert len(found) > 20
    values = {f"V{number}": text for number, text in enumerate(found)}
    site.serving["engine_environment"] = values
    host = site.host_plan()
    landed = systemd_environment(file_text(host, "/etc/fp8fleet/instances/main.env"))
    assert {name: landed[name] for name in values} == values


# YAML


def option_values(seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    values: list[Any] = [*texts(seed, 30), "a\nb", "x " * 200, "yes", "null", "1e3", "0x1", "~", ""]
    values += [True, False, 0, -1, 0.9, 1e-7, 10**12]
    values += [[1, "a", None], {"a": {"b c": ["%"]}}, json.dumps({"k": [1, "é"]})]
    source.shuffle(values)
    return {f"option-{number}": value for number, value in enumerate(values)}


@pytest.mark.parametrize("seed", range(5))
def test_yaml_gives_back_the_options_with_their_types(seed: int) -> None:
    options = option_values(seed)
    back = yaml.safe_load(render.yaml_text(options))
    assert back == options
    assert [type(value) for value in back.values()] == [type(v) for v in options.values()]
    assert list(back) == list(options)


def test_an_option_of_the_inventory_arrives_whatever_it_holds(site: Site) -> None:
    names = [n for n, facts in option_tables()["0.33.0"].options.items() if free(n, facts)]
    held = [value for value in option_values(3).values() if isinstance(value, str | dict)]
    held = [value for value in held if not str(value).startswith("-")]  # vLLM reads an option
    options = dict(zip(names, held, strict=False))
    assert len(options) > 20
    site.serving["instances"] = [{**INSTANCE, "options": options}]
    landed = yaml.safe_load(site.content("/etc/fp8fleet/instances/main.yaml"))
    assert {key: landed[key] for key in options} == options


def free(name: str, facts: OptionFacts) -> bool:
    """Whether an option takes any text."""
    checked = facts.flag or facts.takes or facts.choices or facts.later or facts.nargs
    known = serve_options().get(name)
    return not checked and not (known and known.map) and name not in OWNED_OPTIONS


def test_options_keep_the_order_of_the_inventory(site: Site) -> None:
    options = {"seed": 1, "block-size": 16, "max-num-seqs": 3}
    site.serving["instances"] = [{**INSTANCE, "options": options}]
    keys = list(yaml.safe_load(site.content("/etc/fp8fleet/instances/main.yaml")))
    assert keys[-3:] == ["seed", "block-size", "max-num-seqs"]


# TOML


def test_a_manifest_with_odd_file_names_is_read_back_the_same(site: Site, tmp_path: Path) -> None:
    names = ['a"b', "c d", "é", "模型/😀.bin", "e'f", "$HOME", "#x", "%s"]
    text = (site.root / "models/tiny/manifest.toml").read_text()
    head, _, file = text.partition("[[files]]")
    for name in names:
        literal = json.dumps(name, ensure_ascii=False)
        head += "[[files]]" + file.replace('"config.json"', literal)
    site.file("models/tiny/manifest.toml", head)
    host = site.host_plan()
    assert host.model
    landed = tmp_path / "landed.toml"
    landed.write_text(file_text(host, host.model.manifest), encoding="utf-8")
    assert [entry.path for entry in load_manifest(landed).files] == names


@pytest.mark.parametrize(
    "source", ["https://user:word@m.example.com/x", "https://m.example.com/x?y=1", "file://host/x"]
)
def test_a_source_that_the_hosts_tool_refuses_is_refused_in_the_inventory(
    site: Site, source: str
) -> None:
    site.serving["model_sources"] = [source]
    assert "model_sources" in site.refusal()


# Templates


def test_a_variable_that_a_template_names_and_nobody_gives_is_an_error() -> None:
    with pytest.raises(Exception, match="is undefined"):
        render.template("host/sysctl.conf.j2", {})


@pytest.mark.parametrize("path", sorted(render.TEMPLATES.rglob("*.j2")), ids=lambda p: p.name)
def test_every_template_says_who_wrote_the_file(path: Path) -> None:
    assert "written by fp8fleet" in path.read_text().splitlines()[0]


def test_every_rendered_file_ends_with_one_newline(prod: FleetPlan) -> None:
    for host in prod.hosts.values():
        for path, content in golden_files(host).items():
            assert content.endswith(b"\n"), path
            assert not content.endswith(b"\n\n"), path


# The unit, as systemd reads it


def verified(unit: str, folder: Path) -> str:
    """What ``systemd-analyze verify`` says of a unit, with a program that is there."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not on this machine")
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", unit, flags=re.M)
    path = folder / "fp8fleet-main.service"
    path.write_text(text)
    run = subprocess.run([tool, "verify", "--man=no", str(path)], capture_output=True, text=True)
    return run.stderr


def test_systemd_finds_nothing_wrong_with_a_rendered_unit(site: Site, tmp_path: Path) -> None:
    said = verified(site.content(UNIT), tmp_path)
    assert "fp8fleet-main" not in said, said


@pytest.mark.parametrize("size", [2, 4])
def test_systemd_finds_nothing_wrong_with_a_unit_bound_to_cpus_and_memory(
    site: Site, tmp_path: Path, size: int
) -> None:
    site.file("topology.txt", BRIDGED)
    instance = {"name": "main", "port": 8000, "tensor_parallel_size": size}
    site.serving |= {"topology": "topology.txt", "instances": [instance]}
    unit = site.content(UNIT)
    assert "NUMAPolicy=" in unit
    said = verified(unit, tmp_path)
    assert "fp8fleet-main" not in said, said
    wrong = re.sub("NUMAPolicy=.*", "NUMAPolicy=near", unit)
    assert "near" in verified(wrong, tmp_path)


def test_systemd_would_find_a_wrong_setting(site: Site, tmp_path: Path) -> None:
    unit = site.content(UNIT).replace("[Service]\n", "[Service]\nRestrat=always\n")
    assert "Restrat" in verified(unit, tmp_path)


# Nginx's configuration


def location(text: str, path: str) -> str:
    match = re.search(rf"location {re.escape(path)} {{(.*?)\n        }}", text, flags=re.S)
    assert match, path
    return match[1]


@pytest.mark.parametrize("name", ["gw-1"])
def test_the_proxy_keeps_the_prefix_and_streams(prod: FleetPlan, name: str) -> None:
    api = location(file_text(prod.hosts[name], NGINX), "/v1/")
    assert "proxy_pass http://fp8fleet;" in api
    assert "proxy_http_version 1.1;" in api
    assert 'proxy_set_header Connection "";' in api
    assert "proxy_buffering off;" in api
    timeout = re.search(r"proxy_read_timeout (\d+)s;", api)
    assert timeout
    assert int(timeout[1]) >= 300
    assert "upgrade" not in api.lower()


def test_the_proxys_settings_are_the_inventorys(site: Site) -> None:
    site.serving |= {
        "nginx_listen": 9090,
        "nginx_server_name": "llm.example.com *.example.org",
        "nginx_read_timeout": 900,
        "nginx_connect_timeout": 7,
        "nginx_body_size": "128m",
        "nginx_status_port": 9091,
    }
    text = site.content(NGINX)
    for line in (
        "listen 9090;",
        "server_name llm.example.com *.example.org;",
        "client_max_body_size 128m;",
        "proxy_read_timeout 900s;",
        "proxy_connect_timeout 7s;",
        "listen 127.0.0.1:9091;",
    ):
        assert line in text


def test_health_asks_a_server_and_everything_else_is_not_found(prod: FleetPlan) -> None:
    text = file_text(prod.hosts["gw-1"], NGINX)
    assert "proxy_pass http://fp8fleet/health;" in location(text, "= /healthz")
    assert location(text, "= /v1").split() == ["return", "404;"]
    assert location(text, "/").split() == ["return", "404;"]
    assert text.count("return 404;") == 3  # the third is of the status port
    assert "return 200" not in location(text, "= /healthz")


def test_the_configuration_tells_its_own_digest(prod: FleetPlan) -> None:
    gateway = prod.hosts["gw-1"]
    assert gateway.proxy
    assert f'return 200 "{gateway.proxy.digest}\\n";' in file_text(gateway, NGINX)


# Nginx itself


class Upstream(BaseHTTPRequestHandler):
    """A server that tells what it was asked; ``/v1/stream`` sends one event at a time."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()
    connections: set[tuple[str, int]] = set()  # noqa: RUF012

    def do_GET(self) -> None:
        self.connections.add(self.client_address)
        if self.path == "/v1/stream":
            self.stream()
        else:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.answer(json.dumps({"path": self.path, "headers": headers}).encode())

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(json.dumps({"path": self.path, "size": size}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        self.wfile.flush()
        self.go_on.wait(30)
        self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@dataclass(frozen=True)
class Proxy:
    """A running Nginx with the rendered configuration."""

    port: int
    status_port: int
    digest: str

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        response = self.open("GET", path, port=port)
        return response.status, response.read().decode()

    def open(
        self, method: str, path: str, body: bytes | None = None, port: int | None = None
    ) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", port or self.port, timeout=20)
        connection.request(method, path, body)
        return connection.getresponse()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def unpacked_nginx(folder: Path) -> str | None:
    """The Nginx of the packages that the lab downloaded for its hosts; None where none runs."""
    tool = shutil.which("dpkg-deb")
    packages = sorted(cache_dir().glob("debian-*/nginx_*.deb"), key=lambda p: p.stat().st_mtime)
    if tool is None or not packages:
        return None
    subprocess.run([tool, "-x", str(packages[-1]), str(folder)], check=True)
    program = str(folder / "usr/sbin/nginx")
    try:
        run = subprocess.run([program, "-v"], capture_output=True, check=False)
    except OSError:  # of another processor
        return None
    return program if run.returncode == 0 else None


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An Nginx that runs here: this machine's, or that of the lab's hosts."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    found = found or unpacked_nginx(tmp_path_factory.mktemp("nginx"))
    if found is None:
        pytest.skip("nginx is neither on this machine nor among the lab's packages")
    return found


def configured(site: Site, folder: Path, upstream_port: int) -> tuple[Proxy, Path]:
    """The rendered configuration with its fixed paths moved into ``folder``."""
    site.serving["instances"] = [{**INSTANCE, "port": upstream_port}]
    site.serving |= {"nginx_listen": free_port(), "nginx_status_port": free_port()}
    site.serving["nginx_body_size"] = "1m"
    host = site.host_plan()
    assert host.proxy
    text = file_text(host, NGINX)
    # One worker, since each has connections of its own; as root, since others may not read here.
    text = re.sub(r"^user .*\n", "user root;\n" if os.geteuid() == 0 else "", text, flags=re.M)
    text = text.replace("worker_processes auto;", "worker_processes 1;")
    text = text.replace("/run/nginx.pid", f"{folder}/nginx.pid")
    text = text.replace("/var/log/nginx/", f"{folder}/").replace("/etc/nginx/mime.types", "mime")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    text = text.replace("http {\n", f"http {{\n{temporary}", 1)
    (folder / "mime").write_text("types { text/html html; }\n")
    path = folder / "nginx.conf"
    path.write_text(text)
    return Proxy(host.proxy.listen, host.proxy.status_port, host.proxy.digest), path


def nginx_command(nginx: str, config: Path, *options: str) -> list[str]:
    folder = str(config.parent)
    return [nginx, "-c", str(config), "-p", folder, "-e", "stderr", *options]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(nginx: str, config: Path, port: int) -> Iterator[None]:
    """Nginx with ``config`` until the end of the block; it listens on ``port``."""
    process = subprocess.Popen(nginx_command(nginx, config, "-g", "daemon off;"))
    try:
        while not accepts(port):
            assert process.poll() is None, "nginx ended"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture
def upstream() -> Iterator[int]:
    """The port of a server that answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    Upstream.go_on.clear()
    Upstream.connections.clear()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port
    Upstream.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(nginx: str, site: Site, tmp_path: Path, upstream: int) -> Iterator[Proxy]:
    """A real Nginx before ``upstream``."""
    proxy, config = configured(site, tmp_path, upstream)
    with running(nginx, config, proxy.port):
        yield proxy


def test_nginx_accepts_the_rendered_configuration(nginx: str, site: Site, tmp_path: Path) -> None:
    _, config = configured(site, tmp_path, 8000)
    run = subprocess.run(nginx_command(nginx, config, "-t", "-q"), capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_nginx_keeps_the_v1_prefix_and_its_connections(proxy: Proxy) -> None:
    for _ in range(5):
        status, body = proxy.get("/v1/models?x=1")
        assert status == 200
        assert json.loads(body)["path"] == "/v1/models?x=1"
        assert "connection" not in json.loads(body)["headers"]
    assert len(Upstream.connections) == 1


def test_nginx_passes_each_piece_of_a_stream_at_once(proxy: Proxy) -> None:
    response = proxy.open("GET", "/v1/stream")
    assert response.read1(100) == b"first"
    Upstream.go_on.set()
    assert response.read() == b"last"


def test_nginx_refuses_a_body_above_its_size_and_passes_one_below(proxy: Proxy) -> None:
    small = proxy.open("POST", "/v1/completions", b"x" * 900_000)
    assert json.loads(small.read()) == {"path": "/v1/completions", "size": 900_000}
    assert proxy.open("POST", "/v1/completions", b"x" * 1_100_000).status == 413


@pytest.mark.parametrize(
    "path", ["/", "/invocations", "/metrics", "/tokenize", "/v1", "/v1?a=b", "/v1x", "/v2/x"]
)
def test_nginx_finds_nothing_besides_the_api(proxy: Proxy, path: str) -> None:
    assert proxy.get(path)[0] == 404


def test_nginx_asks_the_servers_health(proxy: Proxy) -> None:
    status, body = proxy.get("/healthz")
    assert status == 200
    assert json.loads(body)["path"] == "/health"


def test_nginx_tells_which_configuration_is_live(proxy: Proxy) -> None:
    assert proxy.get("/live", port=proxy.status_port) == (200, f"{proxy.digest}\n")


def test_nginx_is_not_healthy_with_every_server_dead(
    nginx: str, site: Site, tmp_path: Path
) -> None:
    proxy, config = configured(site, tmp_path, free_port())
    with running(nginx, config, proxy.port):
        assert proxy.get("/healthz")[0] == 502
        assert proxy.get("/v1/models")[0] == 502
