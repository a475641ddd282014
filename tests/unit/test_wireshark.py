"""The dissector for Wireshark runs in a Lua interpreter, with stand-ins for the objects of Wireshark that it uses, and,
where it is installed, in tshark."""

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lupa.lua54 import LuaRuntime
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.utils import wrpcap

from commlayer.tools.dissect import DLCP, HEAD_BYTES, KINDS
from commlayer.tools.wireshark import dissector, places

WIRESHARK = """
base = { DEC = "DEC", HEX = "HEX" }
ProtoField = setmetatable({}, { __index = function(_, kind)
  return function(name, title, display, values, mask) return { name = name, mask = mask } end
end })

function Proto(name)
  return { fields = {}, register_heuristic = function(_, below, check) heuristic = check end }
end

function Buffer(text)
  local range = function(_, at, length)
    assert(at >= 0 and at + length <= #text, "outside the packet")
    local bytes = text:sub(at + 1, at + length)
    return { bytes = bytes, le_uint = function() return (string.unpack("<I" .. #bytes, bytes)) end }
  end
  return setmetatable({ len = function() return #text end }, { __call = range })
end

function Tree(packets)
  local tree = {}
  function tree:add(what, range)
    if what.name == nil then  -- the protocol
      table.insert(packets, { size = #range.bytes })
      return tree
    end
    packets[#packets][what.name] = range.bytes
  end
  function tree:add_le(field, range)
    local value, mask = range:le_uint(), field.mask or -1
    local shift = 0
    while mask >> shift & 1 == 0 do shift = shift + 1 end
    packets[#packets][field.name] = (value & mask) >> shift
  end
  function tree:set_text() end
  return tree
end

function run(text)
  local packets, info = {}, { cols = {} }
  local taken = heuristic(Buffer(text), info, Tree(packets))
  return taken, packets, info.cols.info
end
"""


def dissected(datagram: bytes) -> tuple[bool, list[dict[str, Any]], str]:
    """Whether the dissector takes a datagram, the fields of its packets, and the text of the column Info."""
    lua = LuaRuntime(encoding=None)
    lua.execute(WIRESHARK.encode())
    lua.execute(dissector().encode())
    taken, packets, info = lua.globals()[b"run"](datagram)
    found = [
        {key.decode().removeprefix("dlcp."): value for key, value in packet.items()} for packet in packets.values()
    ]
    return taken, found, "" if info is None else info.decode()


packets = st.builds(
    lambda values, payload: DLCP(**values) / payload,
    st.fixed_dictionaries(
        {
            place.name: st.sampled_from(sorted(KINDS)) if place.name == "kind" else st.integers(0, 2**place.size - 1)
            for place in places()
            if place.name not in ("magic", "version", "length")
        }
    ),
    st.binary(max_size=40),
)


@given(st.lists(packets, min_size=1, max_size=3))
def test_wireshark_shows_the_fields_of_all_packets_of_a_datagram(given_packets: list[Any]) -> None:
    taken, found, info = dissected(b"".join(map(bytes, given_packets)))
    assert taken
    assert len(found) == len(given_packets)
    for row, packet in zip(found, given_packets, strict=True):
        whole = DLCP(bytes(packet))
        for place in places():
            assert row[place.name] % 2**place.size == getattr(whole, place.name), place
        assert row["size"] == 40 + whole.length
        assert row.get("payload", b"") == bytes(whole.payload)
    assert info.startswith(f"{KINDS[given_packets[-1].kind]} rank {given_packets[-1].source}, operation ")


def test_other_datagrams_are_left_to_other_dissectors() -> None:
    whole = bytes(DLCP(kind="DATA") / b"payload!")
    for foreign in (b"", b"hello", whole[:39], whole[:-1], b"\0" + whole[1:], whole[:2] + b"\x10" + whole[3:]):
        assert not dissected(foreign)[0]


def test_fields_follow_each_other_without_gaps() -> None:
    bits = sorted((8 * place.at + place.shift, place.size) for place in places())
    assert (bits[0][0], sum(size for _, size in bits)) == (0, 8 * HEAD_BYTES)
    for (at, size), (after, _) in pairwise(bits):
        assert at + size == after


def test_tshark_shows_the_fields_of_all_packets(tmp_path: Path) -> None:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    sent = [
        [DLCP(kind=kind, source=7, path=2, group=3, sequence=900, index=at, offset=at * 64) / bytes(size)]
        for at, (kind, size) in enumerate((kind, size) for kind in sorted(KINDS) for size in (0, 1, 1200))
    ]
    sent.append([DLCP(kind="DATA", number=number, priority=number) / b"payload" for number in range(5)])  # one of GSO
    capture, script = tmp_path / "job.pcap", tmp_path / "dlcp.lua"
    head = Ether() / IP(src="127.0.0.1", dst="127.0.0.1") / UDP(sport=40000, dport=40001)
    wrpcap(str(capture), [head / b"".join(map(bytes, datagram)) for datagram in sent])
    script.write_text(dissector(), encoding="utf-8")
    names = [place.name for place in places()]
    start = ["tshark", "-X", f"lua_script:{script}", "-r", str(capture)]
    fields = ["-T", "fields", "-E", "aggregator=,", *(word for name in names for word in ("-e", f"dlcp.{name}"))]
    done = subprocess.run([*start, *fields], check=True, capture_output=True, text=True)
    shown = [[column.split(",") for column in line.split("\t")] for line in done.stdout.splitlines()]
    assert len(shown) == len(sent), done.stderr
    for columns, datagram in zip(shown, sent, strict=True):
        for name, column in zip(names, columns, strict=True):
            assert [_number(cell) for cell in column] == [getattr(DLCP(bytes(given)), name) for given in datagram], name
    bad = [*start, "-Y", "_ws.malformed || _ws.lua.error"]
    assert subprocess.run(bad, check=True, capture_output=True, text=True).stdout == ""


def _number(text: str) -> int:
    """A field as tshark prints it."""
    return {"True": 1, "False": 0}[text] if text in ("True", "False") else int(text, 0)
