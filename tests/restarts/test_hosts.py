"""The hosts of a job."""

from dataclasses import replace
from pathlib import Path

import pytest

from axrt.errors import ConfigError
from axrt.restarts.history import Start
from axrt.restarts.hosts import Host, left_out, placed, read_hosts

from .test_decision import start

HOSTS = [Host("a", 4), Host("b", 4), Host("c", 4)]


def lost(*hosts: str) -> Start:
    return replace(start(137), lost=hosts)


def test_every_form_of_a_line_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two racks\nnode-1:4\nnode-2 slots=8 max_slots=8\n\nnode3.rack # the last\n")
    assert read_hosts(file) == [Host("node-1", 4), Host("node-2", 8), Host("node3.rack", 1)]


@pytest.mark.parametrize("text", ["", "a b c\n", "a:4\na:4\n", "a:x\n"])
def test_what_is_no_list_of_hosts_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_hosts(file)
    with pytest.raises(ConfigError):
        read_hosts(tmp_path / "none")


def test_a_host_is_left_out_when_it_has_failed_twice() -> None:
    assert left_out([lost("a", "b"), lost("b")]) == {"b"}
    assert placed(HOSTS, 8, set()) == HOSTS[:2]
    assert placed(HOSTS, 8, {"a"}) == HOSTS[1:]
    assert placed(HOSTS, 6, {"b"}) == [Host("a", 4), Host("c", 2)]
    assert placed(HOSTS, 8, {"a", "b"}) == [Host("c", 4)]


def test_spares_are_kept_back_until_others_are_left_out() -> None:
    assert placed(HOSTS, 12, set(), spares=1) == HOSTS[:2]
    assert placed(HOSTS, 8, {"b"}, spares=1) == [Host("a", 4), Host("c", 4)]
