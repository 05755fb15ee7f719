// Ranks the results of the site's search, and takes their summaries from the article.
//
// Sphinx adds this file to its search page (html_search_scorer in conf.py), behind its own search.
// There, a page with any word of the query in any heading has the highest score, most results have
// it, and the alphabet decides among them.

// The first path that a page's name begins with decides its weight; tests/test_site.py reads this.
const PAGE_WEIGHTS = [
  ["docs/guide/", 1],
  ["docs/tutorials/", 0.9],
  ["README", 0.8],
  ["docs/coming_from", 0.8],
  ["docs/files", 0.8],
  ["docs/limits", 0.7],
  ["docs/reference/", 0.5],
  ["docs/studies", 0.4],
  ["docs/claims/", 0.3],
  ["docs/changelog", 0.2],
  ["docs/", 0.4],
  ["", 0.3]
];
const MIN_SHARE = 0.6; // of the query in a page
const SUMMARY_CHARS = 240;

stopwords.add('can');

const pageWeight = (name) => PAGE_WEIGHTS.find(([path]) => name.startsWith(path))[1];

const stems = (text) => {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
  return [...new Set(words.map((word) => stemmer.stemWord(word)))];
};

// Words that count as one, such as plurals that the stemmer keeps.
const SYNONYMS = [
  ['cpu', 'cpus'],
  ['gpu', 'gpus'],
  ['tpu', 'tpus'],
  ['bf16', 'bfloat16'],
  ['oom', 'memory'],
  ['lr', 'rate'],
  ['dataset', 'data'],
  ['finetune', 'fine'],
].map((words) => words.flatMap(stems));
const listForms = (word) => SYNONYMS.find((words) => words.includes(word)) ?? [word];
const isIn = (word, words) => listForms(word).some((form) => words.includes(form));

const countPages = (word) => {
  const { terms, titleterms } = Search._index;
  const pages = listForms(word).flatMap((form) => [terms[form] ?? [], titleterms[form] ?? []]);
  return new Set(pages.flat()).size;
};

// {word: weight}. A word of few pages tells more than a word of many.
const weigh = (words) => {
  const nDocs = Search._index.docnames.length;
  return new Map([...words].map((word) => [word, Math.log(1 + nDocs / (1 + countPages(word)))]));
};

const weighQuery = () =>
  weigh(stems(new URLSearchParams(window.location.search).get('q') ?? ''));

const sum = (pairs) => pairs.reduce((total, [, weight]) => total + weight, 0);

// The weighted share of the query's words in a title, less if the title has many other words.
const titleShare = (title, weights) => {
  const titleWords = stems(title);
  const matches = [...weights].filter(([word]) => isIn(word, titleWords));
  if (!matches.length) return 0;
  return (sum(matches) / sum([...weights])) * Math.sqrt(matches.length / titleWords.length);
};

const listHeadings = (docname) => {
  const file = Search._index.docnames.indexOf(docname);
  return Object.entries(Search._index.alltitles)
    .filter(([, places]) => places.some(([place]) => place === file))
    .map(([title]) => title);
};

// `var` replaces the object of Sphinx, which reads these numbers; `score` replaces their sums.
var Scorer = {
  score: ([docname, title, , , score, , kind]) => {
    const weights = weighQuery();
    const isText = kind === 'text';
    const shares = (isText ? listHeadings(docname) : []).map((text) => titleShare(text, weights));
    const titles = 2 * titleShare(title.split(' > ').pop(), weights) + Math.max(0, ...shares);
    return pageWeight(docname) * (isText ? score ** 2 : 1) * (1 + titles);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Finds pages with most of the query, by weight; the score is the share of it that a page has.
// Sphinx finds only pages with all words.
const findPages = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const results = new Map();
  let total = 0;
  for (const [word, weight] of weigh(words)) {
    const pages = listForms(word).flatMap((form) => findPages(new Set([form]), excluded));
    if (pages.length) total += weight;
    for (const [docname, page] of new Map(pages.map((page) => [page[0], page]))) {
      if (!results.has(docname)) results.set(docname, page.with(4, 0));
      results.get(docname)[4] += weight;
    }
  }
  const shares = [...results.values()].map((result) => result.with(4, result[4] / total));
  return shares.filter((result) => result[4] >= MIN_SHARE);
};

const readText = (block) => {
  const parts = block.matches('tr') ? [...block.cells] : [block];
  const texts = parts.map((part) => part.textContent.replace(/\s+/g, ' ').trim());
  return texts.filter((text) => text).join(' | ');
};

// Each sentence of a text, with what follows it.
const listWindows = (text) =>
  [0, ...[...text.matchAll(/[.:;!?] (?=\S)/g)].map((match) => match.index + 2)].map((start) => ({
    text: text.slice(start, start + SUMMARY_CHARS),
    isCut: start + SUMMARY_CHARS < text.length,
  }));

// The sentences with most words of the query; code and rows of tables only if they have more.
// Sphinx cuts a summary out of all text of the page, which begins with the theme's menus.
Search.makeSearchSummary = (html, words, anchor) => {
  const page = new DOMParser().parseFromString(html, 'text/html');
  const article = page.querySelector('article.bd-article');
  const section = anchor && page.getElementById(decodeURIComponent(anchor.slice(1)));
  const root = section && article?.contains(section) ? section : article;
  if (!root) return null;
  const hidden = '.headerlink, .toctree-wrapper, script, style, button';
  root.querySelectorAll(hidden).forEach((element) => element.remove());
  const weights = [...weigh(words)];
  const rate = (text, factor) => {
    const textWords = stems(text);
    return factor * sum(weights.filter(([word]) => isIn(word, textWords)));
  };
  let best = { score: -1 };
  for (const block of root.querySelectorAll('p, li, tr, pre, dd')) {
    const isOuter = block.querySelector('p, li, tr, pre'); // its parts are blocks
    if (!block.matches('tr') && (isOuter || block.closest('tr'))) continue;
    const factor = block.closest('pre, tr') ? 0.7 : 1;
    for (const window of listWindows(readText(block))) {
      const score = window.text ? rate(window.text, factor) : -1;
      if (score > best.score) best = { score, ...window };
    }
  }
  if (!best.text) return null;
  const summary = document.createElement('p');
  summary.classList.add('context');
  summary.textContent = best.isCut ? best.text.replace(/\s+\S*$/, ' ...') : best.text;
  return summary;
};
