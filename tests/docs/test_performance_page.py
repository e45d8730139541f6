"""The numbers of the page on performance are those of the reports in benchmarks/."""

import re

import pytest

from tests.docs.page_numbers import ROOT, check_page

pytestmark = pytest.mark.recorded

PAGE = "docs/results/performance.md"


def report(name):
    return (ROOT / "benchmarks" / f"{name}.md").read_text(encoding="utf-8")


def row(name, start):
    """The cells of the row of a report whose first cell starts with a text, without emphasis."""
    (line,) = [line for line in report(name).splitlines() if line.replace("*", "").startswith(f"| {start}")]
    return [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]


def number(text):
    return float(re.search(r"\d[\d,]*\.?\d*", text)[0].replace(",", ""))


def spectra():
    layer = number(row("results", "one layer, d = 768, N = 2048, every quantity, rho > 1")[2])
    floor, kreiss = (number(row("results", f"same, rho {sign} 1")[2]) for sign in "><")
    seconds = number(row("results", "12 layers")[2])
    memory = row("results", "memory of profile()")
    return [
        f"twelve layers of width 768 take {seconds} s",
        f"1/{layer:.1f} of the time of the literal formulas; {floor:.2f} times the floor (one general "
        f"eigendecomposition and three Gram products), {kreiss:.2f} times with a finite Kreiss constant",
        f"after the forward pass | {seconds} s",
        f"Memory at 65,536 states compared with 4,096 | +{number(memory[2])} %",
    ]


def costs():
    of_step, wait = row("monitors", "total")[3], row("monitors", "wait of a step for the store")[2]
    monitors, spectra = (number(row("recording", f"{name} |")[2]) for name in ("monitors", "monitors and spectra"))
    region, outside = (row("shaping", f"trust region, every step{name}")[2] for name in (" (", ", always"))
    published = row("shaping", "published, 0.15 / 10")
    live, modes = (number(row("live", name)[4]) for name in ("two runs in training", "the same runs"))
    sweep, loop = row("sweep", "sweep, runs")[3], row("sweep", "independent training loops")[3]
    ratio, low, high = re.findall(r"\d\.\d+", sweep)
    loops = [line.strip("|").split("|") for line in report("foreign").splitlines() if " ms | **" in line]
    steps, mean, middle = ([number(cells[i]) for cells in loops] for i in (1, 2, 3))
    asked = re.findall(r"of a step of ([\d,]+) ms, and \*\*([\d.]+)%", report("step_costs"))
    (small, large, long) = [f"{share} % of {'a step of ' * (i == 0)}{ms} ms" for i, (ms, share) in enumerate(asked)]
    assert report("step_costs").count("all are measured: 1 and 0.") == len(asked)  # copies and waits
    paper = published[1].split(" %")[0].replace("-", " to ")
    band = f"{number(region)} to {number(outside)} %"
    assert "32 x 256" in report("monitors")
    assert "32 x 256" in report("shaping")
    return [
        f"Recorder, probes and alarms take {number(of_step):.2f} % of the processor time",
        f"recommended KSS takes {band}",
        f"{number(of_step):.2f} % of the processor time of a step; a step waits for the store for {number(wait)} ms "
        f"(median), one that writes a block of 200 steps for {number(wait.split(':')[1]):.0f} ms",
        f"{min(mean):.0f} to {max(mean):.0f} % of the time of a step of {min(steps):.0f} to {max(steps):.0f} ms "
        f"(mean), {min(middle):.0f} to {max(middle):.0f} % (median)",
        f"predicted {small} (d = 512, L = 8), {large} and {long} (1.3B)",
        f"{monitors} % of the time; {spectra} % with spectra of 2,048 states every 50 steps",
        f"{number(region)} % of the time outside of KSS while every block is inside the band, {number(outside)} %",
        f"KSS as published | {number(published[2])} % (published: {paper} %)",
        f"{live} % of the pace of the runs; {modes} % with 2,000 modes each",
        f"{ratio} times the runs of one (four rounds, {low} to {high}; a bare loop gains {number(loop)})",
    ]


def streaming():
    def of(start):
        cells = row("streaming", f"{start} |")
        return {"memory": cells[2], "minutes": number(cells[4]) / 60, "seconds": number(cells[4]), "ratio": cells[6],
                "block": number(cells[7]), "bound": cells[9]}  # fmt: skip

    full, low, single = (of(f"1.3B, streamed{name}") for name in (", full rank", ", rank 64", " as float32, rank 64"))
    blocks = "8 blocks of Llama 2 7B, streamed"
    big, big_low, big_single = (of(f"{blocks}{name}") for name in (", full rank", ", rank 64", " as float32, rank 64"))
    return [
        f"1.3B | {full['minutes']:.0f} min, {full['memory']} | {low['minutes']:.1f} min, {low['memory']} |",
        f"one block of Llama 2 7B | {big['block']:.0f} s, {big['memory']} | {big_low['block']:.0f} s, "
        f"{big_low['memory']}; {big_low['bound']} times reading it",
        f"Streaming takes {full['ratio']} (full rank) and {low['ratio']} (rank 64) times as long",
        f"takes {single['seconds']:.0f} s and {single['memory']} for 1.3B at rank 64, and {big_single['block']:.0f} s "
        "for a block of 7B",
    ]


def accuracy():
    text = report("accuracy")
    good, poor = row("accuracy", "0e+00 to 1e+06"), row("accuracy", "1e+06 to 1e+10")
    assert (good[2], poor[2], poor[5]) == ("1e-08", "1e-05", "none")
    n_problems = int(good[1]) + int(poor[1])
    assert f"{n_problems} random problems" in text
    (name, above) = good[5].split()
    assert name == "eigenvector_condition"
    return [
        f"on {n_problems} random problems",
        "agree to 1e-5 where the condition number of the covariance is at most 1e10",
        "below 1e6 the target is 1e-8, and the largest difference, that of an eigenvector condition, is "
        f"{above[:3]}e-8",
    ]


def on_a_gpu():
    assert "NVIDIA H100" in report("gpu")
    (eigenvalues,) = [line for line in report("gpu").splitlines() if re.match(r"\| 2,048 \| 5", line)]
    _, _, _, host, device, *_ = (cell.strip() for cell in eigenvalues.split("|"))
    moments, loop = row("gpu", "2,048, 16,384"), row("gpu", "no options")
    kss = [row("gpu", f"KSS, {name}") for name in ("recommended", "published")]
    more = re.search(r"\(\+([\d.]+) %; mean.*and \+([\d.]+) % \(step.*parameters \+([\d.]+) %", report("gpu")).groups()
    return [
        f"takes {number(device) / 1e3} s at a width of 2,048, and {host} with the",
        f"of this width take {moments[2]} instead of {moments[1]}",
        f"{loop[2]} steps per second where a plain loop reaches {loop[1]}",
        f"takes {more[0]} to {more[1]} % longer, and with 1.3 billion parameters at most {more[2]} %",
        f"down to {kss[0][2]} steps per second in its recommended form and to {kss[1][2]} as published, where the "
        f"plain loop reaches {kss[0][1]} and {kss[1][1]}",
    ]


def test_every_number_is_that_of_a_report():
    claims = [*spectra(), *costs(), *streaming(), *accuracy(), *on_a_gpu()]
    settings = (
        "width 768 from 2,048 states", "d = 512, L = 8, batches of 32 x 256 tokens", "d = 128, L = 4",
        "batches of 8 x 64 tokens", "updates 50 to 300",
        "d = 256, L = 6, batches of 32 x 256 tokens", "2,048 states; memory", "rank 64", "Beyond 1e10",
        "On one H100", "of an H100", "Moments of 16,384 states", "with d = 512 and L = 8", "of 22 to 23 ms",
        "first hundred",
    )  # fmt: skip
    for setting, name in (
        ("d = 512, L = 8", "monitors"),
        ("d = 128, L = 4", "recording"),
        ("d = 128, L = 4", "foreign"),
        ("d = 256, L = 6", "shaping"),
    ):
        assert setting in report(name)
    check_page(PAGE, claims, settings=settings)
