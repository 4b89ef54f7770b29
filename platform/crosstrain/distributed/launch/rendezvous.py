"""Several machines that train together: who they are, and how they find each other."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from crosstrain.utils.errors import ConfigError, UserError

PORT = 29400  # where the rendezvous is unless --rdzv-endpoint says otherwise; torchrun's

# How the nodes meet, in seconds and numbers of tries. A node that sends no sign of life for `keep_alive_interval *
# keep_alive_max_attempt` is given up.
_MEETING = {"join_timeout": 120, "last_call_timeout": 5, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}


@dataclass(frozen=True)
class Nodes:
    """This machine among others. Node 0 keeps the rendezvous at `host:port`, where the nodes meet before each start."""

    least: int  # training waits for so many nodes
    most: int  # and takes no more than these
    rank: int
    host: str
    port: int
    address: str  # of this machine, for the others
    meeting: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(
        nnodes: str | None, node_rank: int | None, rdzv_endpoint: str | None, local_addr: str | None,
        rdzv_conf: str | None = None,
    ) -> Nodes | None:  # fmt: skip
        """From the flags of the command line, None for one node; ConfigError for what makes no sense."""
        least, most = _numbers(nnodes or "1")
        if most == 1:
            return None
        if rdzv_endpoint is None:
            raise ConfigError(f"--nnodes {nnodes}: needs --rdzv-endpoint HOST:PORT, node 0's address and a free port")
        if node_rank is None:
            raise ConfigError(f"--nnodes {nnodes}: needs --node-rank, 0 on one machine and 1 to {most - 1} on others")
        if not 0 <= node_rank < most:
            raise ConfigError(f"--node-rank: must be from 0 to {most - 1} with --nnodes {nnodes}, got {node_rank}")
        host, port = _endpoint(rdzv_endpoint)
        meeting = _MEETING | _meeting(rdzv_conf)
        address = _checked(local_addr) if local_addr else _towards(host, port, meeting["join_timeout"])
        if _is_loopback(address) and not _is_loopback(host):
            raise ConfigError(
                f"--local-addr: {host} is {address} on this machine, which others cannot reach; give the address at "
                f"which they can"
            )
        return Nodes(least, most, node_rank, host, port, address, meeting)

    @property
    def hosts(self) -> bool:
        """Whether this node keeps the rendezvous."""
        return self.rank == 0

    @property
    def interface(self) -> str | None:
        """The network interface that has this machine's address, where the system tells (Linux)."""
        return _interface(self.address)

    def wait_for_host(self) -> None:
        """Return when node 0 answers; UserError if it does not in time."""
        deadline = time.monotonic() + self.meeting["join_timeout"]
        while not self.hosts:
            try:
                socket.create_connection((self.host, self.port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"--rdzv-endpoint: nobody answers at {self.host}:{self.port} ({error.strerror or error}); "
                        f"start node 0 there with the same command and --node-rank 0"
                    ) from None
                time.sleep(0.5)


def _numbers(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes: {text!r} is not a number of nodes, such as 2, or a range, such as 1:2")
    return least, most


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rdzv-endpoint: {text!r} is not HOST:PORT")
    return host, int(port)


def _meeting(text: str | None) -> dict[str, int]:
    pairs = dict(pair.partition("=")[::2] for pair in (text or "").split(",") if pair)
    for key, value in pairs.items():
        if key not in _MEETING:
            raise ConfigError(f"--rdzv-conf: {key!r} is unknown; known: {', '.join(_MEETING)}")
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"--rdzv-conf: {key} needs a whole number above 0, got {value!r}")
    return {key: int(value) for key, value in pairs.items()}


def _checked(address: str) -> str:
    """An address or name of this machine as a numeric address."""
    try:
        numeric = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]
        family = socket.AF_INET6 if ":" in str(numeric) else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError:
        raise ConfigError(f"--local-addr: {address} is not an address of this machine") from None
    return str(numeric)


def _towards(host: str, port: int, patience: float) -> str:
    """The address from which this machine would speak to another. Names may become known while nodes start."""
    deadline = time.monotonic() + patience
    while True:
        try:
            family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline or not isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"--rdzv-endpoint: {host} cannot be reached from here ({error.strerror or error})"
                ) from None
            time.sleep(1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _interface(address: str) -> str | None:
    if sys.platform != "linux":
        return None
    if ":" in address:
        wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((fields[-1] for fields in lines if fields[0] == wanted), None)
    if _is_loopback(address):
        return "lo"
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR (linux/sockios.h): struct ifreq with the name in, a sockaddr_in at byte 16 out.
                answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(256, b"\0"))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
