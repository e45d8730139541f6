"""Report files: every sentence links to a row with the same number, and files are written atomically."""

import ast
import base64
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr
from markdown_it import MarkdownIt

import workbench as wb
from tests.about import about, says
from tests.reports import made_trees
from workbench.assessment.criteria import RATE
from workbench.errors import SchemaError, StoreError
from workbench.formatting import percent
from workbench.reports import formats
from workbench.reports.assessment_document import rate_sentences
from workbench.reports.document import Lead, Numbers, Paragraph, Picture, ReportTable, sentence_of
from workbench.reports.make_report import document_of, report
from workbench.schema.statuses import Verdict

pytestmark = pytest.mark.render


class Reader(HTMLParser):
    """Parser of a page: its sentences with their links, and the numbers at the anchors."""

    def __init__(self, html):
        super().__init__()
        self.sentences, self.shown, self.links, self.tags, self.section = [], {}, [], [], ""
        self._open, self._link, self._sentence = [], None, None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag in ("img", "meta", "link"):
            return
        self._open.append((tag, attrs))
        if tag == "section" and attrs.get("id"):
            self.section = attrs["id"]
        if attrs.get("class") == "s":
            self._sentence = {"section": self.section, "text": "", "links": []}
        if tag == "a" and attrs.get("class") == "n":
            self._link = [attrs["href"].removeprefix("#"), ""]
        if tag == "data":
            self.shown[next(a["id"] for t, a in reversed(self._open) if t == "td")] = ["", attrs["value"]]

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self._link is not None:
            self._link[1] += data
        if self._sentence is not None:
            self._sentence["text"] += data
        if self._open and self._open[-1][0] == "data":
            list(self.shown.values())[-1][0] += data

    def handle_endtag(self, tag):
        started, attrs = self._open.pop()
        assert started == tag
        if self._link is not None and tag == "a":
            self.links.append(tuple(self._link))
            if self._sentence is not None:
                self._sentence["links"].append(tuple(self._link))
            self._link = None
        if attrs.get("class") == "s":
            self.sentences.append(self._sentence)
            self._sentence = None


def test_every_sentence_links_to_a_row_with_the_same_number(written):
    page = Reader(written.html)
    sentences_of = {section: [s for s in page.sentences if s["section"] == section] for section in ("v1", "v2", "v4")}
    assert all(sentences_of.values())
    for sentences in sentences_of.values():
        for sentence in sentences:
            assert sentence["links"], sentence["text"]
    assert len(page.links) > 20
    for anchor, text in page.links:
        assert page.shown[anchor][0] == text


def test_statements_are_sentences_that_cite_numbers(written):
    """Sections 1, 2 and 4 consist of headings, leads and such sentences."""
    for section in written.document.sections:
        if section.key == "v3":
            continue
        assert section.sentences
        assert not list(section.each(Picture))
        assert len(list(section.each(Lead))) == 1
        for sentence in section.sentences:
            assert sentence.quantities
            assert re.search(r"[.:]$", sentence.text)
            assert "{" not in sentence.text
            assert "  " not in sentence.text


def test_the_numbers_are_those_of_the_tree(written):
    page = Reader(written.html)
    quantities = {q.anchor: q for section in written.document.sections for q in section.cited}
    assert quantities
    checked = 0
    for anchor, quantity in quantities.items():
        if quantity.variable.startswith("@") or "==" in quantity.variable:
            continue
        stored = written.tree[quantity.path][quantity.variable].isel(dict(quantity.selection)).squeeze().item()
        shown = page.shown[anchor][1]
        if isinstance(stored, str):
            assert shown == stored
        else:
            np.testing.assert_allclose(float(shown) if shown not in ("True", "False") else shown == "True", stored)
        checked += 1
    assert checked > 5


def test_the_page_is_self_contained(written):
    page = Reader(written.html)
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object")]
    for tag, attrs in page.tags:
        for key in ("src", "href"):
            if key in attrs and tag != "use":
                assert attrs[key].startswith(("#", "data:")), attrs[key][:60]
    assert "@import" not in written.html
    assert "url(" not in written.html
    images = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(images) == len(written.document.pictures) >= 3


@pytest.mark.slow
def test_pictures_are_embedded_and_the_page_is_small(tmp_path):
    tree = made_trees.assessment()
    html = report(tree, tmp_path / "a.html").read_text(encoding="utf-8")
    assert len(html.encode()) < 3_000_000
    sources = [attrs["src"] for tag, attrs in Reader(html).tags if tag == "img"]
    assert len(sources) == len(document_of(tree).pictures)
    for source in sources:
        content = base64.b64decode(source.partition(",")[2])
        assert content.startswith((b"\x89PNG", b"<?xml"))
        assert len(content) > 3000


def test_the_page_is_accessible_to_screen_readers(written):
    page = Reader(written.html)
    tags = [tag for tag, _ in page.tags]
    assert ("html", {"lang": "en"}) in page.tags
    assert tags.count("h1") == tags.count("main") == tags.count("title") == 1
    assert tags.count("caption") == tags.count("table")
    assert tags.count("figcaption") == tags.count("figure") == tags.count("img")
    assert all(attrs["alt"] for tag, attrs in page.tags if tag == "img")
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in page.tags if tag == "th")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", ["assessment", "diagnosis", "comparison"])
def test_markdown_has_the_same_sentences_and_links(kind, tmp_path, without_pictures):
    tree = getattr(made_trees, kind)()
    document = document_of(tree)
    text = report(tree, tmp_path / "a (1).md").read_text(encoding="utf-8")
    shown = dict(re.findall(r'<span id="(n-[^"]+)"></span>(.*?) \|', text))
    links = re.findall(r"\[([^\]]+)\]\(#(n-[^)]+)\)", text)
    assert {anchor for _, anchor in links} >= {q.anchor for section in document.sections for q in section.cited}
    for words, anchor in links:
        assert shown[anchor] == words
    html = MarkdownIt("commonmark").enable("table").render(text)
    plain = re.sub(r"<[^>]+>", "", html).replace("&quot;", '"').replace("&amp;", "&")
    for section in document.sections:
        for sentence in section.sentences:
            assert sentence.text in plain
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == len(document.pictures)
    for address in pictures:
        assert (tmp_path / address.replace("%20", " ").replace("%28", "(").replace("%29", ")")).is_file()


def test_the_notebook_is_complete_with_its_data(tmp_path, without_pictures):
    import nbformat

    tree = made_trees.assessment()
    path = report(tree, tmp_path / "report.ipynb")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    shown = dict(re.findall(r'<span id="(n-[^"]+)"></span>(.*?) \|', text))
    links = re.findall(r"\[([^\]]+)\]\(#(n-[^)]+)\)", text)
    assert links
    assert all(shown[anchor] == words for words, anchor in links)
    xr.testing.assert_identical(
        wb.open_run(tmp_path / "report.nc")["criteria"].to_dataset(), tree["criteria"].to_dataset()
    )


def test_the_cells_of_the_notebook_redraw_their_pictures(tmp_path, monkeypatch, without_pictures):
    """Every cell is run, with a display function that records the figures."""
    import holoviews as hv
    import nbformat

    tree = made_trees.assessment()
    notebook = nbformat.read(report(tree, tmp_path / "report.ipynb"), as_version=4)
    monkeypatch.chdir(tmp_path)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    names, shown = {}, []
    exec(cells[0], names)
    names["show"] = shown.append
    for source in cells[1:]:
        exec(source, names)
    assert len(shown) == len(document_of(tree).pictures) == len(cells) - 1
    assert all(isinstance(figure, hv.Layout) for figure in shown)


def test_texts_of_the_tree_cannot_become_markup(tmp_path, without_pictures):
    tree = made_trees.assessment(subject="<script>alert(1)</script> | [x](y) *b*")
    html = report(tree, tmp_path / "a.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    text = report(tree, tmp_path / "a.md").read_text()
    assert text.startswith("# &lt;script>alert(1)&lt;/script> \\| \\[x\\](y) \\*b\\*\n")


@pytest.mark.parametrize("name", ['w"] if not ran.append(1) else tree["wide', "w'] + ran.append(1) + ['", "w\\'"])
def test_a_name_in_the_tree_is_no_code_of_the_notebook(name, tmp_path, without_pictures):
    import nbformat

    tree = made_trees.comparison()
    nodes = {node.path.replace("/wide", f"/{name}", 1): node.to_dataset() for node in tree.subtree if node.has_data}
    designs = [name if each == "wide" else each for each in tree["designs"]["design"].values.tolist()]
    renamed = xr.DataTree.from_dict(nodes | {"/designs": nodes["/designs"].assign_coords(design=designs)})
    renamed.attrs = tree.attrs
    for design, old in zip(designs, ("wide", "deep"), strict=True):
        renamed[design].attrs = tree[old].attrs
    cells = nbformat.read(report(renamed, tmp_path / "a.ipynb"), as_version=4).cells
    codes = [cell.source for cell in cells[2:] if cell.cell_type == "code"]
    for code in codes:
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        functions = {ast.unparse(call.func).rpartition("(")[2] for call in calls}
        assert "ran.append" not in functions
    assert len(codes) == sum("show(" in code for code in codes) > 0


def test_files_are_written_atomically_and_never_over_others(tmp_path, without_pictures, monkeypatch):
    tree = made_trees.diagnosis()
    path = report(tree, tmp_path / "a.html")
    before = path.read_text()
    with pytest.raises(StoreError, match="a.html exists already; pass overwrite=True"):
        report(tree, path)
    (tmp_path / "b.nc").write_text("mine")
    with pytest.raises(StoreError, match="b.nc exists already"):
        report(tree, tmp_path / "b.ipynb")
    assert (tmp_path / "b.nc").read_text() == "mine"
    assert not (tmp_path / "b.ipynb").exists()

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(formats, "image", fail)
    with pytest.raises(MemoryError):
        report(tree, path, overwrite=True)
    assert path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.nc"]


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda tree: tree["pilot"].to_dataset(), about("tree")),
        (lambda tree: xr.DataTree(), says("The kind of the tree is None, expected one of assessment,")),
        (lambda tree: tree.drop_nodes("criteria"), says("which its report cites; create the tree again.")),
        (lambda tree: tree.drop_nodes("flow"), says("which its report cites; create the tree again.")),
    ],
)
def test_an_incomplete_tree_is_rejected(spoil, check, tmp_path):
    with pytest.raises(SchemaError, check=check):
        report(spoil(made_trees.assessment()), tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_an_unknown_suffix_is_rejected(tmp_path):
    with pytest.raises(StoreError, check=says("expected one of .html, .md, .ipynb.")):
        report(made_trees.diagnosis(), tmp_path / "a.pdf")


def test_a_criterion_that_differs_from_its_source_is_rejected(tmp_path):
    tree = made_trees.assessment()
    data = tree["criteria"].to_dataset()
    data["value"][1] += 0.5
    tree["criteria"] = xr.DataTree(data)
    with pytest.raises(
        SchemaError, match="is 3.9, but /flow gradient_gain, layer 2 is 3.4", check=says("The value of the criterion")
    ):
        report(tree, tmp_path / "a.html")


def test_a_sentence_without_a_number_is_rejected():
    with pytest.raises(ValueError, match="cites no number"):
        sentence_of("All is {word}.", word="well")


def test_every_verdict_and_state_has_a_text():
    states = {"proceed": "healthy", "cannot say": "not measured", "at risk": "at risk", "refuse": "failing"}
    assert set(states) == set(Verdict)
    for verdict, state in states.items():
        document = document_of(made_trees.assessment(verdict))
        assert (document.verdict, document.state) == (verdict, state)
        assert document.facts
        assert len(document.actions) == 3
    kinds = {block.text for block in document.sections[3].blocks if hasattr(block, "text")}
    assert {"Change", "Monitor", "Koopman Spectral Shaping", "Stop the run when"} <= kinds


@pytest.mark.parametrize("is_stand_in", [False, True])
def test_no_sentence_cites_unknown_rates(is_stand_in):
    document = document_of(made_trees.without_rates(is_stand_in=is_stand_in))
    labels = [fact.label for fact in document.facts]
    assert labels
    assert not {"largest useful rate", "planned rate over its upper limit"} & set(labels)
    text = " ".join(s.text for s in document.sections[0].sentences)
    assert "It is unknown whether 0.003 is a useful learning rate: no rate tried was too large." in text
    assert ("Of the trials of the first updates of a proxy model of width 64 with 4 blocks" in text) == is_stand_in
    assert "33\N{NO-BREAK SPACE}% diverged" in text
    assert document.verdict == "cannot say"


def test_the_reason_of_an_unknown_failure_mode_is_stated():
    modes = [s.text for s in document_of(made_trees.without_rates()).sections[1].sentences]
    meaning = "the planned rate is too small or too large to learn well"
    assert f"Whether {meaning} was not measured: trials do not cover smaller rates." in modes


def test_designs_with_unknown_rates_are_compared_without_them(tmp_path, without_pictures):
    known, unknown = made_trees.assessment("proceed", subject="deep"), made_trees.without_rates(is_stand_in=True)
    table = made_trees.comparison()["designs"].to_dataset()
    table = table.assign_coords(design=["large", "deep"])
    table = table.assign(verdict=("design", ["cannot say", "proceed"]), useful_edge=("design", [np.nan, 0.0021]))
    tree = xr.DataTree.from_dict({"designs": table, "large": unknown, "deep": known})
    tree.attrs = {"kind": "comparison", "schema_version": 1}
    document = document_of(tree)
    assert [fact.label for fact in document.facts] == ["deep", "large"]
    assert [fact.remark for fact in document.facts] == [
        "learning rates useful up to 0.0021",
        "useful learning rates unknown",
    ]
    assert document.actions[0].text == "Choose deep: verdict proceed, learning rates up to 0.0021 are useful."
    assert document.actions[1].text == "The next best is large: verdict cannot say, useful learning rates unknown."
    assert report(tree, tmp_path / "a.html").stat().st_size > 0
    single = xr.DataTree.from_dict({"designs": table.isel(design=[0]), "large": unknown})
    single.attrs = tree.attrs
    assert document_of(single).actions[0].text.startswith("None can be recommended from these measurements; the")


def test_known_rates_are_stated_once_with_their_interval():
    document = document_of(made_trees.assessment())
    assert document.facts[0].label == "largest useful rate"
    assert (document.facts[0].quantity.value, document.facts[0].remark) == (
        0.0021,
        "0.00105 to 0.00462; planned: 0.003",
    )
    text = " ".join(s.text for s in document.sections[0].sentences).replace("\N{NO-BREAK SPACE}", " ")
    sentence = (
        "For 1,000 updates, the best learning rate is about 0.0007, and rates from 7e-5 to 0.0021 (interval 0.00105 to "
        "0.00462) are useful; the planned rate is 0.003."
    )
    assert text.count(sentence) == 1, text
    assert "stable" not in text


def test_a_diagnosis_without_a_step_or_experiments():
    document = document_of(made_trees.diagnosis(failure_step=-1, with_outcome=False))
    assert not any("at step" in s.text for s in document.sections[0].sentences if "loss" in s.text)
    assert (document.verdict, document.state) == (
        "Points to: learning rate too high; no normalization is not excluded",
        "failing",
    )
    tree = made_trees.diagnosis()
    tree["experiments"] = xr.DataTree(tree["experiments"].to_dataset().isel(experiment=[]))
    (sentence,) = next(document_of(tree).sections[3].each(Paragraph)).sentences
    assert sentence.text.startswith("Correct what the evidence points to: learning rate too high (the strongest is ")
    assert document_of(tree).actions == (sentence,)


def test_a_run_without_a_finding_is_reported_without_a_probability_of_health():
    document = document_of(made_trees.diagnosis(is_healthy=True))
    verdict = "Nothing found in what was recorded"
    assert (document.verdict, document.state, document.actions) == (verdict, "not measured", ())
    assert (document.facts, document.summary) == ((), f"{verdict}.")
    assert "If the run should have learned more" in next(document.sections[3].each(Lead)).text
    assert "90\N{NO-BREAK SPACE}%" not in " ".join(s.text for part in document.sections for s in part.sentences)


@pytest.mark.parametrize("kind", ["healthy", "hyperparameter", "precision"])
def test_no_cause_has_a_probability(kind, tmp_path, without_pictures):
    tree = wb.diagnose(wb.samples.failed_run(kind))
    document = document_of(tree)
    screen = [document.verdict, document.summary, *(action.text for action in document.actions)]
    text = " ".join([*screen, *(s.text for section in document.sections[:2] for s in section.sentences)])
    assert not document.facts
    assert "probab" not in text
    for probability in tree["causes"]["probability"].values:
        assert f"({percent(float(probability))})" not in text.replace("\N{NO-BREAK SPACE}", " ")
    assert report(tree, tmp_path / "a.html").stat().st_size > 0


def test_the_summary_states_useful_rates_and_no_healthy_criterion():
    (fact,) = document_of(wb.samples.open("assessments")["gpt2"].copy()).facts
    assert fact.label == "largest useful rate"
    assert "estimated on a proxy model of width 64 with 4 blocks; planned: 0.0006; limit: 0.00383" in fact.remark


def test_the_ratio_of_the_planned_rate_is_that_to_the_limit_that_the_report_states():
    numbers = Numbers(wb.samples.open("assessments")["gpt2"].copy())
    (sentence,) = (each for each in rate_sentences(numbers) if "Published designs" in each.text)
    planned, limit, ratio = (numbers.value("pilot", name) for name in ("planned_rate", "upper_rate_limit", RATE))
    assert planned.value / limit.value == pytest.approx(ratio.value)
    assert f"its limit, three times the upper end; the planned rate is {ratio.text} times this limit" in sentence.text
    assert limit.value == pytest.approx(3 * numbers.value("pilot", "useful_edge_high").value)
    tree = wb.samples.open("assessments")["gpt2"].copy(deep=True)
    tree["pilot"] = xr.DataTree(tree["pilot"].to_dataset().drop_vars("upper_rate_limit"))  # as saved earlier
    (sentence,) = (each for each in rate_sentences(Numbers(tree)) if "Published designs" in each.text)
    assert f"the planned rate is {ratio.text} times this limit" in sentence.text


def test_the_summary_states_the_proposed_rate():
    document = document_of(made_trees.assessment())
    assert document.actions[0].text == "Lower the peak rate (learning rate: 0.0021)."
    assert "planned rate over its upper limit" not in " ".join(fact.label for fact in document.facts)


def test_names_of_the_library_keep_their_case():
    text = " ".join(s.text for s in document_of(wb.samples.open("assessments")["gpt2"].copy()).sections[3].sentences)
    assert "wb.Alarms raises an alarm" in text
    assert "Wb." not in text


def test_evidence_from_measurements_and_from_settings_is_separate():
    text = " ".join(s.text for s in document_of(made_trees.diagnosis()).sections[1].sentences)
    assert "Evidence for it from measurements: odd sharpness rate" in text
    assert "Evidence against it from settings: odd warmup" in text
    assert "from measurements only" not in text


def test_a_tree_of_an_earlier_version_is_described_by_its_first_cause():
    tree = made_trees.diagnosis()
    causes = tree["causes"].to_dataset().drop_vars(["is_possible", "mechanism_probability"])
    tree["causes"] = xr.DataTree(causes)
    tree["evidence"] = xr.DataTree(tree["evidence"].to_dataset().drop_vars("kind"))
    del tree.attrs["coverage"]
    assert document_of(tree).verdict == "Points to: learning rate too high"
    tree.attrs["shows_failure"] = 0
    document = document_of(tree)
    assert (document.verdict, document.state, document.actions) == ("No failure observed", "not measured", ())


def test_outcomes_of_experiments_precede_the_next_experiments():
    tree = made_trees.diagnosis()
    data = tree["experiments"].to_dataset()
    tree["experiments"] = xr.DataTree(data.assign(outcome=data["outcome"][::-1], supports=data["supports"][::-1]))
    tried, to_do = (action.text for action in document_of(tree).actions)
    assert tried == "The same with normalization: done, the run diverged nevertheless; supports no normalization: yes."
    assert to_do.startswith("A third of the rate: replay 120 steps from step 360 with and without")
    texts = [s.text for s in document_of(tree).sections[3].sentences]
    assert "Result: the run converged (supports no normalization: yes)." in texts


def test_weak_symptoms_are_in_a_collapsed_table_and_no_sentence_cites_them(tmp_path, without_pictures):
    tree = made_trees.with_weak_symptoms(60)
    document = document_of(tree)
    shown, weak = (t for t in document.sections[2].each(ReportTable) if "log-odds" in t.columns)
    cited = {quantity.anchor for section in document.sections for quantity in section.cited}
    assert not shown.is_folded
    assert weak.is_folded
    assert len(shown.rows) + len(weak.rows) == 65
    assert len(weak.rows) > 50
    for row in weak.rows:
        value, weight = (cell.quantity for cell in row if cell.quantity)
        assert abs(weight.value) < 0.4
        assert cited.isdisjoint((value.anchor, weight.anchor))
    html = report(tree, tmp_path / "a.html").read_text()
    assert f"<details><summary>{len(weak.rows)} more symptoms, each of which changes the odds" in html
    assert f'id="{weak.rows[0][1].quantity.anchor}"' in html
    text = report(tree, tmp_path / "a.md").read_text()
    assert f"*{len(weak.rows)} more symptoms" in text
    assert 'omitted here; they are in tree["evidence"]'.replace("[", "\\[").replace("]", "\\]") in text
    assert weak.rows[0][1].quantity.anchor not in text


def test_one_design_of_a_comparison_has_a_report(tmp_path, monkeypatch):
    comparison, seen = made_trees.comparison(), []
    name = next(name for name in comparison.children if name != "designs")
    module = sys.modules[report.__module__]  # the package has a function of the same name
    monkeypatch.setattr(module.formats, "html", lambda document, tree: seen.append((document, tree)) or "")
    report(comparison[name], tmp_path / "one.html")
    ((document, tree),) = seen
    assert document.summary == comparison[name].attrs["summary"]
    assert tree.parent is None
    assert set(tree.children) == set(comparison[name].children)
