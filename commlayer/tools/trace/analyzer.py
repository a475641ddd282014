"""Flight records for torch's analyzer, which reads pickles and evaluates some of their text: whoever can write its
folder can run code as its user. So the pickles are made anew, of checked records, in a folder of the user alone."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from ...transport.whole_file import whole_file
from .flight import ranks_of
from .operation import Record
from .records import content


def write(records: Sequence[Record], folder: Path, pickles: bool = False) -> int:
    """Makes the folder, with `flight_<rank>` of each flight record. Returns their number.

    Raises ValueError if the folder is there, or cannot be made.
    """
    flights = [record for record in records if record.kind == "flight"]
    if not flights:
        raise ValueError("--analyzer: no flight record is there, and torch's analyzer reads nothing else")
    try:
        folder.mkdir(mode=0o700, parents=True)
        for record in flights:
            dump = dict(content(record.path, pickles))
            dump["pg_config"] = {
                str(name): {"name": str(name), "desc": str(group["desc"]), "ranks": str(list(ranks_of(group["ranks"])))}
                for name, group in dump["pg_config"].items()
            }
            with whole_file(folder / f"flight_{record.rank}") as file:
                pickle.dump(dump, file)
    except OSError as error:
        raise ValueError(f"--analyzer {folder}: {error.strerror}; name a folder that is not there yet") from error
    return len(flights)
