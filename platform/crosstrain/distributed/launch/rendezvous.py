"""The nodes of a run: their number, addresses and rendezvous."""

import ipaddress
import re
import socket
import sys
import time
from dataclasses import dataclass, field

from crosstrain.utils.errors import ConfigError, UserError

PORT = 29400  # torchrun's default for the rendezvous

# Defaults of --rdzv-conf, in seconds and attempts. A node without a heartbeat for `keep_alive_interval *
# keep_alive_max_attempt` seconds is considered lost.
_RDZV_CONF = {"join_timeout": 120, "last_call_timeout": 5, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as configured on this machine. The nodes meet at node 0's `host:port` before each start."""

    min_nodes: int  # training starts only when at least this many nodes have joined
    max_nodes: int
    rank: int  # of this machine
    host: str
    port: int
    local_addr: str  # address at which the other nodes reach this machine
    rdzv_conf: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(
        nnodes: str | None,
        node_rank: int | None,
        rdzv_endpoint: str | None,
        local_addr: str | None,
        rdzv_conf: str | None = None,
    ) -> "Nodes | None":
        """Parse the command-line flags. Returns None for a single node. Raises ConfigError for invalid flags."""
        found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes or "1")
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise ConfigError(f"--nnodes: {nnodes!r} is not a number of nodes, such as 2, or a range, such as 1:2")
        if most == 1:
            return None
        if rdzv_endpoint is None:
            raise ConfigError(f"--nnodes {nnodes}: needs --rdzv-endpoint HOST:PORT, node 0's address and a free port")
        if node_rank is None:
            raise ConfigError(
                f"--nnodes {nnodes}: needs --node-rank, 0 on one machine and 1 to {most - 1} on the others"
            )
        if not 0 <= node_rank < most:
            raise ConfigError(f"--node-rank: must be from 0 to {most - 1} with --nnodes {nnodes}, got {node_rank}")
        host, port = _endpoint(rdzv_endpoint)
        conf = _RDZV_CONF | _parse_conf(rdzv_conf)
        address = _own_address(local_addr) if local_addr else _address_towards(host, port, conf["join_timeout"])
        if is_loopback(address) and not is_loopback(host):
            raise ConfigError(
                f"--local-addr: the address of this node towards {host} is {address}, which other nodes cannot reach; "
                f"give an address that they can reach"
            )
        return Nodes(least, most, node_rank, host, port, address, conf)

    @property
    def is_host(self) -> bool:
        return self.rank == 0

    @property
    def interface(self) -> str | None:
        """Name of the network interface with this machine's address; None if there is no such interface."""
        import psutil  # only needed for runs on several machines

        if is_loopback(self.local_addr):  # psutil does not list all loopback addresses
            return "lo" if sys.platform == "linux" else None
        listed = {a.address.partition("%")[0]: name for name, known in psutil.net_if_addrs().items() for a in known}
        return listed.get(self.local_addr.partition("%")[0])

    def wait_for_host(self) -> None:
        """Wait until node 0 answers. Raises UserError after the join timeout."""
        deadline = time.monotonic() + self.rdzv_conf["join_timeout"]
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"--rdzv-endpoint: no answer from {self.host}:{self.port} ({error.strerror or error}); "
                        f"start node 0 there with the same command and --node-rank 0"
                    ) from None
                time.sleep(0.5)


def _endpoint(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[.+\]|[^:]+)(?::(\d+))?", text)  # brackets hold an IPv6 address
    if found is None or not 0 < (port := int(found[2] or PORT)) < 65536:
        raise ConfigError(f"--rdzv-endpoint: {text!r} is not HOST:PORT")
    return found[1].strip("[]"), port


def _parse_conf(text: str | None) -> dict[str, int]:
    pairs = dict(pair.partition("=")[::2] for pair in (text or "").split(",") if pair)
    for key, value in pairs.items():
        if key not in _RDZV_CONF:
            raise ConfigError(f"--rdzv-conf: {key!r} is unknown; known: {', '.join(_RDZV_CONF)}")
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"--rdzv-conf: {key} needs a whole number above 0, got {value!r}")
    return {key: int(value) for key, value in pairs.items()}


def _own_address(address: str) -> str:
    """Convert an address or host name of this machine to a numeric address."""
    try:
        numeric = str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError:
        raise ConfigError(f"--local-addr: {address} is not an address of this machine") from None
    return numeric


def _address_towards(host: str, port: int, timeout: float) -> str:
    """Return this machine's address on the route to `host`; retry while the name cannot be resolved."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # for UDP, this sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline or not isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"--rdzv-endpoint: {host} cannot be reached from here ({error.strerror or error})"
                ) from None
            time.sleep(1)


def is_loopback(host: str) -> bool:
    """Return True for a host name or address that only programs on this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
