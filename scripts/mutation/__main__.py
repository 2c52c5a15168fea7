"""Says which planted faults the tests find; see scripts/mutants."""

import argparse
import shutil
from pathlib import Path

from .draw import FOLDERS, all_sites, drawn
from .measure import Measurement
from .report import read_equivalent, report
from .trial import Limits

ROOT = Path(__file__).resolve().parents[2]


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    add = parser.add_argument
    add("--sample", type=int, default=150, help="how many faults are drawn, over all folders")
    add("--seed", type=int, default=7, help="of the draw")
    add("--only", choices=FOLDERS, metavar="FOLDER", help="of those drawn, those of one folder")
    add("--list", action="store_true", help="say what is drawn, and plant nothing")
    add("--out", type=Path, default=ROOT / "runs" / "mutants", help="folder of the measurement")
    add("--resume", action="store_true", help="go on with what the folder has")
    add("--workers", type=int, default=2, help="faults that are tried at the same time")
    add("--cpu-s", type=float, default=60.0, help="seconds of the processor for each fault")
    add("--wall-s", type=float, default=900.0, help="seconds of the clock for each fault")
    return parser.parse_args()


def main() -> None:
    """Draw, run the suite with probes, plant, confirm, report."""
    asked, every = _asked(), all_sites(ROOT)
    of = drawn(every, asked.sample, asked.seed)
    if asked.only:
        of = {asked.only: of[asked.only]}
    sites = [site for some in of.values() for site in some]
    if asked.list:
        for site in sites:
            print(f"{site.key}  {site.place}  {site.operator}: {site.before} -> {site.after}")
        return
    out = asked.out.resolve()
    if not asked.resume:
        shutil.rmtree(out, ignore_errors=True)
    measurement = Measurement(ROOT, out, ["scripts/test"])
    limits = Limits(asked.cpu_s, asked.wall_s)
    measurement.probe(sites)
    measurement.plant(of, measurement.choice(), limits, asked.workers)
    if unfit := measurement.confirm(measurement.choice(), limits):
        print("fail without a fault, so they find none:", *sorted(unfit), sep="\n  ")
        measurement.forget(unfit)
        measurement.plant(of, measurement.choice(unfit), limits, asked.workers)
    known = measurement.results()
    tests = f"{len(measurement.choice().tests)} tests passed on the code without a fault."
    equivalent = read_equivalent()
    page = report([known[site.key] for site in sites], equivalent, measurement.took(), tests)
    (out / "report.md").write_text(page)
    print(page)
    there = {site.key for some in every.values() for site in some}
    if gone := sorted(equivalent.keys() - there):
        print("equivalent.txt names what the code no longer has:", *gone)


main()
