"""The report's style sheet: two columns on a desktop, one on a phone, in the reader's light or dark colours."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f5f6f8; --ink: #1d2430; --soft: #5b6472; --line: #d9dde3;
  --series-1: #2563c9; --series-2: #d9661f; --series-3: #2c8a57;
  --good: #1f7a45; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --panel: #1d2229; --ink: #e4e8ee; --soft: #9aa4b2; --line: #343b46;
    --series-1: #6ea8ff; --series-2: #ffa366; --series-3: #6fd19c;
    --good: #6fd19c; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1140px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
header p { color: var(--soft); margin: .3rem 0 0; }
.status {
  font-size: .8rem; font-weight: 600; vertical-align: middle; white-space: nowrap;
  padding: .15rem .6rem; border-radius: 1rem; border: 1px solid currentColor;
}
.good { color: var(--good); } .bad { color: var(--bad); } .plain { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.3rem 0 0; }
.cards div { background: var(--panel); border-radius: .5rem; padding: .6rem .8rem; }
.cards dd { margin: 0; font-size: 1.4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards dt { color: var(--soft); font-size: .85rem; }
pre {
  background: var(--panel); border-radius: .5rem; padding: 1rem; margin: 0; max-height: 32rem; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .88rem/1.5 ui-monospace, Menlo, Consolas, monospace;
}
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem; }
.groups { columns: 2 26rem; column-gap: 1.2rem; }
.groups div { break-inside: avoid; padding-bottom: 1.2rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .2rem; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
th { width: 50%; font-weight: 400; color: var(--soft); overflow-wrap: anywhere; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
section > table th { width: 11rem; }
@media (max-width: 30rem) { section > table th { width: 35%; } }
"""
