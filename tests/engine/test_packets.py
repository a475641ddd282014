"""The scapy layer beside the C code: the same bytes and tags. And captures, read back."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cffi
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.utils import wrpcap
from typer.testing import CliRunner

from commlayer.tools import dissect
from commlayer.tools.cli import app
from commlayer.tools.dissect import AUTHS, DLCP, Captured, Verifier, captured, seal, siphash, split
from commlayer.tools.listing import HEADING, _letters, listing
from commlayer.transport.secret import mixed, read_secret
from tests import ROOT

NATIVE = ROOT / "native"
KEY = bytes(range(16))
ETHERNET = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
FIELDS = st.fixed_dictionaries(
    {
        "kind": st.integers(0, max(dissect.KINDS)),
        "priority": st.integers(0, 7),
        "last": st.integers(0, 1),
        "ack_now": st.integers(0, 1),
        "droppable": st.integers(0, 1),
        "tail": st.integers(0, 1),
        "source": U16,
        "path": st.integers(0, 15),
        "signature": st.integers(0, 4095),
        "epoch": U16,
        **dict.fromkeys(("group", "sequence", "index", "offset", "number"), U32),
    }
)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """packet.c and what it needs, compiled by themselves: the engine's module does not export them."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("native") / "packet.so"
    include = [f"-I{NATIVE}", f"-I{NATIVE / 'include'}"]
    sources = [str(NATIVE / "protocol" / name) for name in ("packet.c", "siphash.c")]
    sources += map(str, (NATIVE / "kernels").glob("*.c"))
    flags = ["-std=c11", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), *include, *sources], check=True)
    ffi = cffi.FFI()
    ffi.cdef(
        """
        struct cl_packet { uint8_t kind, flags; uint16_t source, length, path, signature, epoch;
                           uint32_t group, sequence, index, offset, number; };
        struct cl_siphash_key { uint64_t k0, k1; };
        struct cl_nh_key { uint32_t words[2][256]; };
        struct cl_seal { int auth; uint64_t job; struct cl_siphash_key key; const struct cl_nh_key *nh; };
        void cl_packet_expand_key(struct cl_nh_key *nh, const struct cl_siphash_key *key);
        int cl_kernels_select(const char *level);
        struct cl_siphash_key cl_siphash_key(const uint8_t *bytes);
        void cl_packet_encode(const struct cl_packet *packet, uint8_t *head);
        bool cl_packet_decode(struct cl_packet *packet, const uint8_t *bytes, size_t length);
        void cl_packet_seal(uint8_t *head, const uint8_t *payload, const struct cl_seal *seal, uint16_t destination,
                            uint64_t number);
        bool cl_packet_open(const uint8_t *bytes, const struct cl_seal *seal, uint16_t destination, uint64_t number);
        """
    )
    return ffi, ffi.dlopen(str(library))


@given(
    fields=FIELDS,
    payload=st.one_of(st.binary(max_size=50), st.binary(min_size=60, max_size=2200)),
    level=st.sampled_from(["scalar", "avx2", "avx512"]),
    key=st.binary(min_size=16, max_size=16),
    auth=st.sampled_from(sorted(AUTHS)),
    destination=U16,
    number_high=U32,
)
def test_python_and_c_agree(
    native: Any,
    fields: dict[str, int],
    payload: bytes,
    level: str,
    key: bytes,
    auth: str,
    destination: int,
    number_high: int,
) -> None:
    ffi, lib = native
    lib.cl_kernels_select(level.encode())  # changes nothing where the CPU lacks it
    layer: Any = DLCP  # scapy's types know no keywords
    built = bytes(seal(layer(**fields) / payload, key, destination, auth=auth, number_high=number_high))

    names = ("kind", "source", "path", "signature", "epoch", "group", "sequence", "index", "offset", "number")
    bits = ("last", "ack_now", "droppable", "tail")
    flags = fields["priority"] | sum(fields[name] << bit for bit, name in enumerate(bits, 3))
    values = {name: fields[name] for name in names} | {"flags": flags, "length": len(payload)}
    buffer = ffi.new("uint8_t[]", len(built))
    ffi.memmove(buffer + 40, payload, len(payload))
    nh = ffi.new("struct cl_nh_key *")
    secret = ffi.new("struct cl_seal *", {"auth": AUTHS[auth], "key": lib.cl_siphash_key(key), "nh": nh})
    lib.cl_packet_expand_key(nh, ffi.addressof(secret, "key"))
    number = number_high << 32 | fields["number"]
    lib.cl_packet_encode(ffi.new("struct cl_packet *", values), buffer)
    lib.cl_packet_seal(buffer, buffer + 40, secret, destination, number)
    assert bytes(ffi.buffer(buffer)) == built
    assert lib.cl_packet_open(buffer, secret, destination, number)

    decoded = ffi.new("struct cl_packet *")
    assert lib.cl_packet_decode(decoded, buffer, len(built))
    (parsed,) = split(built)
    assert {name: getattr(decoded, name) for name in values} == values
    assert {name: getattr(parsed, name) for name in fields} == fields
    assert bytes(parsed) == built


def test_siphash_gives_the_value_of_the_paper() -> None:
    assert siphash(KEY, bytes(range(15))) == 0xA129CA6149BE45E5  # appendix A


def test_a_payload_of_several_packets_is_split() -> None:
    several = [DLCP(number=number) / bytes(number) for number in range(3)]
    payload = b"".join(map(bytes, several))
    assert [(packet.number, packet.length) for packet in split(payload)] == [(0, 0), (1, 1), (2, 2)]
    assert list(split(b"x" * 100)) == []
    assert len(list(split(payload[:-1]))) == 2


def conversation(key: bytes) -> list[Any]:
    """Frames of ranks 0 and 1: a whole number that wraps, an ACK, and a forged one."""

    def frame(source: int, packet: Any, seconds: float) -> Any:
        host, other = ("192.0.2.1", "192.0.2.2") if source == 0 else ("192.0.2.2", "192.0.2.1")
        made: Any = ETHERNET / IP(src=host, dst=other) / UDP(sport=1000, dport=1000) / bytes(packet)
        made.time = seconds
        return made

    data = DLCP(kind="DATA", source=0, group=7, number=0xFFFFFFFF, last=1) / b"payload!"
    wrapped = DLCP(kind="DATA", source=0, group=7, number=0, last=1) / b"payload!"
    ack = DLCP(kind="ACK", source=1, number=0, offset=1, signature=9) / b"\0\0\1\0"
    forged = DLCP(kind="ABORT", source=1, group=7, number=5, tag=1234)
    return [
        frame(1, seal(ack, key, 0), 1.0),
        frame(0, seal(data, key, 1), 1.001),
        frame(0, seal(wrapped, key, 1, number_high=1), 1.002),
        frame(1, forged, 1.003),
        ETHERNET / IP() / UDP(sport=53) / b"something else",
    ]


def test_tags_in_a_capture_are_verified() -> None:
    found = list(captured(conversation(KEY)))
    assert [dissect.KINDS[packet.packet.kind] for packet in found] == ["ACK", "DATA", "DATA", "ABORT"]
    verifier = Verifier(KEY, found)
    verifier._numbers[found[1].sender, found[1].receiver, False] = 0xFFFFFFF0  # the capture began long before
    assert [verifier.verify(packet) for packet in found] == [True, True, True, False]
    alone: list[Captured] = found[1:2]
    assert Verifier(KEY, alone).verify(alone[0]) is None


def test_dissect_prints_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "some.pcap"
    wrpcap(str(path), conversation(KEY))
    result = CliRunner().invoke(app, ["dissect", str(path), "--key", KEY.hex()])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in result.output
    assert sum("192.0.2." in line and " = " in line for line in lines) == 2
    packets = lines[lines.index(HEADING) + 1 :]
    assert [line.split()[2] for line in packets] == ["ACK", "DATA", "DATA", "ABORT"]
    assert [line.split()[-1] for line in packets] == ["ok", "ok", "ok", "BAD"]
    assert next(line.split()[1] for line in packets) in ("A>B", "B>A")
    assert ["m9" in line.split() for line in packets] == [True, False, False, False]
    result = CliRunner().invoke(app, ["dissect", str(path), "--limit", "1"])
    assert result.output.splitlines()[-2].endswith(" ?")
    assert result.output.endswith("... and 3 more\n")
    result = CliRunner().invoke(app, ["dissect", str(path), "--key", "abcd"])
    assert result.exit_code == 2
    assert "32 hex digits" in result.output


def test_dissect_prints_json(tmp_path: Path) -> None:
    path = tmp_path / "some.pcap"
    wrpcap(str(path), conversation(KEY))
    result = CliRunner().invoke(app, ["dissect", str(path), "--key", KEY.hex(), "--json", "-"])
    found = json.loads(result.output)
    assert [row["tag_ok"] for row in found] == [True, True, True, False]
    captures = list(captured(conversation(KEY)))
    for row, packet in zip(found, captures, strict=True):
        assert row["kind"] == dissect.KINDS[packet.packet.kind]
        assert row["from"] == "{}:{}".format(*packet.sender)
        assert (row["number"], row["tag"]) == (packet.packet.number, f"{packet.packet.tag:016x}")
    result = CliRunner().invoke(app, ["dissect", str(path), "--json", "-", "--limit", "2"])
    assert [load["tag_ok"] for load in json.loads(result.output)] == [None, None]


def test_a_wide_packet_keeps_its_line(tmp_path: Path) -> None:
    """Large numbers widen a line rather than being cut."""
    packet = seal(DLCP(kind="DATA", source=1, group=1 << 30, sequence=1 << 31, number=1 << 31), KEY, 0)
    frame = ETHERNET / IP(src="192.0.2.1", dst="192.0.2.2") / UDP(sport=1, dport=2) / bytes(packet)
    lines = list(listing(list(captured([frame])), None))
    assert f"{1 << 30}/{1 << 31}/0" in lines[-1]
    assert [_letters(number) for number in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_dissect_fetches_the_key_of_a_running_job(tmp_path: Path) -> None:
    path = tmp_path / "some.pcap"
    wrpcap(str(path), conversation(KEY))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ask = ["dissect", str(path), "--store", f"127.0.0.1:{store.port}"]
    assert "has no job of commlayer" in CliRunner().invoke(app, ask).output
    store.set("commlayer/job", f"77 {KEY.hex()}")
    result = CliRunner().invoke(app, ask)
    assert f"--key {KEY.hex()}" in result.output
    assert result.output.count(" ok\n") == 3
    store.set("commlayer/job", f"77 {KEY.hex()} paired")
    assert "a key of their own" in CliRunner().invoke(app, ask).output
    for bad in ("127.0.0.1", ":7", "host:x"):
        result = CliRunner().invoke(app, ["dissect", str(path), "--store", bad])
        assert (result.exit_code, "use HOST:PORT" in result.output) == (2, True)
    result = CliRunner().invoke(app, [*ask, "--key", KEY.hex()])
    assert "use one of them" in result.output


def test_dissect_mixes_the_secret_file_into_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMLAYER_SECRET_FILE", raising=False)
    path, secret = tmp_path / "some.pcap", tmp_path / "secret"
    secret.write_bytes(b"a secret of the job, in each host's file")
    wrpcap(str(path), conversation(mixed(KEY, read_secret(str(secret)))))
    ask = ["dissect", str(path), "--key", KEY.hex()]
    without = CliRunner().invoke(app, ask).output
    assert "has the job a COMMLAYER_SECRET_FILE?" in without
    assert " ok\n" not in without
    given = CliRunner().invoke(app, [*ask, "--secret-file", str(secret)]).output
    assert given.count(" ok\n") == 3
    monkeypatch.setenv("COMMLAYER_SECRET_FILE", str(secret))
    assert CliRunner().invoke(app, ask).output == given
    result = CliRunner().invoke(app, [*ask, "--secret-file", str(tmp_path / "none")])
    assert (result.exit_code, "No such file" in result.output) == (2, True)


@pytest.mark.parametrize("key", ["xyz", "abcd", "", KEY.hex() + "00", " " + KEY.hex()[1:]])
def test_dissect_refuses_an_invalid_key(tmp_path: Path, key: str) -> None:
    path = tmp_path / "some.pcap"
    wrpcap(str(path), conversation(KEY))
    result = CliRunner().invoke(app, ["dissect", str(path), "--key", key])
    assert result.exit_code == 2
    assert result.output == f"commlayer dissect: --key {key!r}: use 32 hex digits\n"


@pytest.mark.parametrize("content", [b"", b"no capture at all, but a text that is long enough to be one"])
def test_dissect_fails_on_a_file_without_a_capture(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "[some].txt"
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["dissect", str(path)])
    assert result.exit_code == 2
    assert result.output.startswith(f"commlayer dissect: {path}: ")
    assert "name a capture file of tcpdump" in result.output


def test_dissect_says_that_nothing_of_ours_is_in_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "[other].pcap"
    wrpcap(str(path), conversation(KEY)[-1:])
    result = CliRunner().invoke(app, ["dissect", str(path)])
    assert (result.exit_code, result.output) == (0, f"{path}: it has no packet of commlayer\n")
