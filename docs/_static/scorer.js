// Order of search results: pages that answer questions come before lists of files and tables.

var Scorer = {
  score([page, title, , , score]) {
    const words = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().trim();
    if (words && title.toLowerCase().includes(words)) score += 10;
    if (/^(explanation|how_to|install|course)/.test(page)) score += 4;
    if (/^(tutorials|gallery|reference)/.test(page)) score += 2;
    if (/^(files|data|contributing|architecture|results\/third_party)/.test(page)) score -= 2;
    return score;
  },
  // The values of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
