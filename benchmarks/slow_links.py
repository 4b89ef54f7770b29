"""Network namespaces joined by slow links, for benchmarks on one machine. Needs root and /dev/net/tun.

A relay process forwards packets between the namespaces. Each namespace sends at `rate` bits per second, and a packet
arrives `latency` seconds after it was sent.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import multiprocessing
import os
import select
import struct
import subprocess
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000


class SlowLinks:
    """`count` namespaces with the addresses 10.78.0.1, 10.78.0.2, and so on."""

    def __init__(self, count: int, latency: float, rate: float) -> None:
        self.names = [f"slow{os.getpid()}n{i}" for i in range(count)]
        self.addresses = [f"10.78.0.{i + 1}" for i in range(count)]
        self._relay = multiprocessing.Process(target=_relay, args=(self.names, latency, rate), daemon=True)

    def __enter__(self) -> SlowLinks:
        for name in self.names:
            _ip("netns", "add", name)
        self._relay.start()
        for name, address in zip(self.names, self.addresses, strict=True):
            while "tun0" not in _ip("-n", name, "link"):  # the relay creates it
                time.sleep(0.05)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "tun0")
            _ip("-n", name, "link", "set", "tun0", "mtu", "9000", "txqueuelen", "5000", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.kill()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def sent(self) -> list[int]:
        """Bytes that each namespace has sent, with all headers."""
        found = [json.loads(_ip("-n", name, "-j", "-s", "link", "show", "tun0")) for name in self.names]
        return [links[0]["stats64"]["tx"]["bytes"] for links in found]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _open(name: str) -> int:
    """Create the device tun0 in a namespace, and return its file descriptor."""
    with Path(f"/run/netns/{name}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN | _IFF_NO_PI))
    return device


def _relay(names: list[str], latency: float, rate: float) -> None:
    devices = [_open(name) for name in names]
    free = dict.fromkeys(devices, 0.0)  # when a namespace may send its next packet
    waiting: list[tuple[float, int, int, bytes]] = []  # arrival, number, device, packet
    number = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, [], [], timeout)[0]:
            packet = os.read(device, 65536)
            now = time.monotonic()
            free[device] = max(free[device], now) + len(packet) * 8 / rate
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the IPv4 destination
            if 0 <= target < len(devices):
                heapq.heappush(waiting, (free[device] + latency, number, devices[target], packet))
                number += 1
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(waiting[0][2], heapq.heappop(waiting)[3])
