"""A dissector of DLCP for Wireshark, written in Lua from the fields of `dissect.DLCP`, so that there is one table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scapy.fields import BitEnumField, BitField

from .dissect import DLCP, HEAD_BYTES, KINDS, MAGIC, VERSION

HEXADECIMAL = frozenset({"magic", "signature", "tag"})
"""Fields that are not shown as decimal numbers."""

CODE = """\
-- Dissector of DLCP, the protocol of commlayer, version {version}: `commlayer dissect --lua FILE` wrote it.
-- Copy it into the folder of Wireshark's personal Lua plugins, or: tshark -X lua_script:FILE -r CAPTURE
local dlcp = Proto("dlcp", "DLCP of commlayer")
local kinds = {{ {kinds} }}
local fields = {{
{fields}
  payload = ProtoField.bytes("dlcp.payload", "payload"),
}}
for _, field in pairs(fields) do table.insert(dlcp.fields, field) end

-- The bytes of the packet that begins at `at`; nil: another protocol's.
local function size_of(buffer, at)
  if buffer:len() - at < {head} or buffer(at, 2):le_uint() ~= {magic} then return nil end
  if math.floor(buffer(at + 2, 1):le_uint() / 16) ~= {version} then return nil end
  local size = {head} + buffer(at + 6, 2):le_uint()
  return size <= buffer:len() - at and size or nil
end

local function add_packet(buffer, at, size, tree)
  local packet = tree:add(dlcp, buffer(at, size))
{adds}
  if size > {head} then packet:add(fields.payload, buffer(at + {head}, size - {head})) end
  local number = buffer(at + 2, 1):le_uint() % 16
  local text = string.format("%s rank %d, operation %d/%d/%d, offset %d, %d bytes",
    kinds[number] or ("kind " .. number), buffer(at + 4, 2):le_uint(), buffer(at + 8, 4):le_uint(),
    buffer(at + 12, 4):le_uint(), buffer(at + 16, 4):le_uint(), buffer(at + 20, 4):le_uint(), size - {head})
  packet:set_text("DLCP: " .. text)
  return text
end

function dlcp.dissector(buffer, info, tree)
  local at, count, text = 0, 0, nil
  local size = size_of(buffer, at)
  while size do
    text = add_packet(buffer, at, size, tree)
    at, count = at + size, count + 1
    size = size_of(buffer, at)
  end
  if count == 0 then return 0 end
  info.cols.protocol = "DLCP"
  info.cols.info = count == 1 and text or string.format("%s (the last of %d packets)", text, count)
  return at
end

dlcp:register_heuristic("udp", function(buffer, info, tree) return dlcp.dissector(buffer, info, tree) > 0 end)
"""


class Place(NamedTuple):
    """The place of a field: `size` bits of the little-endian number of `length` bytes at byte `at`."""

    name: str
    at: int
    length: int
    shift: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether the field is all of its number."""
        return self.size == 8 * self.length

    @property
    def mask(self) -> int:
        """The field's bits in the number."""
        return ((1 << self.size) - 1) << self.shift


def places() -> Iterator[Place]:
    """The fields of the header, in their order. Bit fields fill their number from the highest bit on."""
    at, bits = 0, list[tuple[str, int]]()
    for field in DLCP.fields_desc:
        if not isinstance(field, BitField | BitEnumField):
            length = int(field.sz)
            yield Place(field.name, at, length, 0, 8 * length)
            at += length
            continue
        bits.append((field.name, field.size))
        whole = left = sum(size for _, size in bits)
        if whole % 8 == 0:
            for name, size in bits:
                left -= size
                yield Place(name, at, whole // 8, left, size)
            at += whole // 8
            bits.clear()


def dissector() -> str:
    """The dissector as a file for Wireshark 3 or later."""
    found = list(places())
    return CODE.format(
        version=VERSION,
        head=HEAD_BYTES,
        magic=f"{MAGIC:#x}",
        kinds=", ".join(f'[{number}] = "{name}"' for number, name in KINDS.items()),
        fields="\n".join(f"  {place.name} = {_field(place)}," for place in found),
        adds="\n".join(
            f"  packet:add_le(fields.{place.name}, buffer(at + {place.at}, {place.length}))" for place in found
        ),
    )


def _field(place: Place) -> str:
    """The expression that makes a field's ProtoField."""
    names = f'"dlcp.{place.name}", "{place.name}"'
    if place.size == 1:
        return f"ProtoField.bool({names}, {8 * place.length}, nil, {place.mask:#x})"
    base = "HEX" if place.name in HEXADECIMAL else "DEC"
    values = "kinds" if place.name == "kind" else "nil"
    rest = "" if place.is_whole else f", {values}, {place.mask:#x}"
    return f"ProtoField.uint{8 * place.length}({names}, base.{base}{rest})"
