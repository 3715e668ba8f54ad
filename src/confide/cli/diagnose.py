"""`confide moe diagnose`: the private diagnostics of a run as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from confide.cli.output import print_json, print_table


def diagnose(
    run: Annotated[
        Path, typer.Argument(help="Folder of `confide train --diagnostics`, or where diagnostics.json is.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what the experts of a run made of its records. Private: never share."""
    found = read(run)
    if json:
        print_json(found)
        return
    print(found["note"])
    for title, header, rows in tables(found):
        print_table(title, header, rows)
    for line in remarks(found):
        print(line)


def read(run: Path) -> dict[str, Any]:
    """The document of a run.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    import json as parser

    from confide.errors import ConfigError
    from confide.finetune.diagnostics import FILE_NAME, SCHEMA

    places = (run, run / FILE_NAME, run / "private" / FILE_NAME)
    file = next((place for place in places if place.is_file()), places[-1])
    try:
        found = parser.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"there are no diagnostics in {run}; they are written by `confide train --method raptor "
            "--diagnostics`"
        ) from None
    except ValueError:
        raise ConfigError(f"{file} is damaged; it is no JSON") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ConfigError(f"{file} holds no diagnostics of schema {SCHEMA}")
    return found


Table = tuple[str, Sequence[str], list[list[str]]]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """(title, header, rows) of everything that was measured."""
    made: list[Table] = [
        (
            "Roles over training",
            ("role", "parameters", "steps", "longer than C", "mean SNR", "variation", "s"),
            [
                [
                    role["role"] if role["role"] == role["stream"] else f"{role['role']} ({role['stream']})",
                    f"{role['parameters']:,}",
                    str(role["steps"]),
                    f"{100 * role['clipped']:.0f} %",
                    _number(role["mean_snr"]),
                    _number(role["snr_variation"]),
                    f"{role['seconds']:.2f}",
                ]
                for role in found["roles"]
            ],
        )
    ]
    shares = [
        [role["role"], *(f"{share:.2f}" for share in role["share"])]
        for role in found["roles"]
        if role["share"]
    ]
    if shares:
        quarters = ("first", "second", "third", "last")[: len(shares[0]) - 1]
        made.append(("Share of the squared norms, by quarter of training", ("role", *quarters), shares))
    if found["estimator"]:
        made.append(_estimator(found["estimator"], found["simulated"], found["records"]))
    if found["transfer"]:
        pairs = zip(found["transfer"]["public"], found["transfer"]["private"], strict=True)
        made.append(
            (
                "Evenness of owners, H/log E, by layer",
                ("block", "public", "private"),
                [[str(a["block"]), f"{a['evenness']:.3f}", f"{b['evenness']:.3f}"] for a, b in pairs],
            )
        )
    return made


def _estimator(closed: Mapping[str, Any], drawn: Mapping[str, Any], records: int) -> Table:
    rows = []
    for expert, scale in enumerate(closed["scale"]):
        along, along_error = drawn["scale"][expert], drawn["scale_error"][expert]
        error = closed["bias"][expert] ** 2 + closed["sampling"][expert]
        rows.append(
            [
                str(expert),
                f"{scale:.3f}",
                "–" if along is None else f"{along:.3f} ± {along_error:.3f}",
                f"{closed['bias'][expert]:.2e}",
                f"{error:.2e}",
                f"{drawn['error'][expert]:.2e} ± {drawn['error_error'][expert]:.1e}",
                f"{closed['noise'][expert]:.2e}",
            ]
        )
    header = ("expert", "scale", "scale drawn", "bias", "error²", "error² drawn", "noise²")
    return f"Each expert's gradient against the mean of its records ({records} records)", header, rows


def remarks(found: Mapping[str, Any]) -> list[str]:
    """What the tables don't hold, in sentences."""
    lines = []
    if found["mismatch"] is not None:
        lines.append(
            f"M_role: the shared parameters' SNR is {found['mismatch']:.2f} times the experts' mean."
        )
    if even := found["imbalance"]:
        lines.append(
            f"Owners of all records: {' '.join(map(str, even['counts']))}; {even['deficit']:.3f} nats short "
            f"of even. Relative bias: mean {even['mean_bias']:.3f} (at most {even['mean_bound']:.3f}), "
            f"largest {even['largest_bias']:.3f} (at most {even['largest_bound']:.3f}), root mean square "
            f"{even['variation']:.3f} (at least {even['least_variation']:.3f})."
        )
    if found["silent"] is not None:
        lines.append(f"{_percent(found['silent'])} of the records have no gradient at all at their owner.")
    if stable := found["stability"]:
        lines.append(
            f"Owners after training: {_percent(stable['changed'])} changed; "
            f"{_percent(stable['kept_for_sure'])} could not, as their votes moved less than their margin "
            f"(mean margin {stable['margin']:.3f}, 10 % quantile {stable['low_margin']:.3f})."
        )
        lines.append(
            f"Estimated half way: κ {stable['kappa']:.4f} at most and {stable['mean_kappa']:.4f} in the "
            f"mean, over a drift of {stable['drift']:.3f}. They predict "
            f"{_percent(stable['changed_at_most'])} and {_percent(stable['changed_by_mean'])} changed, "
            f"a straight line {_percent(stable['changed_along_line'])}. Estimates, no bounds."
        )
    if drift := found["drift"]:
        bound = (
            "no bound without clipping" if drift["stale_bound"] is None else f"≤ {drift['stale_bound']:.2e}"
        )
        lines.append(
            f"Expected gradients of the experts, of norm {drift['norm']:.2e} in the end: stale owners "
            f"({drift['changed']} changed) cost {drift['stale']:.2e} ({bound}); since the start they moved "
            f"by {drift['moved']:.2e}, where the estimated L = {drift['lipschitz']:.2e} says "
            f"{drift['moved_estimate']:.2e}; both together {drift['total']:.2e}."
        )
    if moved := found["transfer"]:
        same = moved["public_choice"] == moved["private_choice"]
        rank = "" if moved["agreement"] is None else f" Rank correlation {moved['agreement']:.2f}."
        lines.append(
            f"Public text ranks block {moved['public_choice']} first, and the records "
            f"{'do too' if same else 'rank block ' + str(moved['private_choice'])}.{rank}"
        )
    sizes = ", ".join(f"{name} {count:,}" for name, count in found["parameters"].items())
    lines.append(f"Parameters: {sizes}.")
    times = ", ".join(f"{name} {value:.1f} s" for name, value in found["seconds"].items())
    lines.append(f"Queries took: {times}. The process had at most {found['peak_bytes'] / 2**20:,.0f} MiB.")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
