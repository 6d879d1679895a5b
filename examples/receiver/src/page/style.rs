//! The stylesheet. It is part of the page, which loads nothing else.

pub(crate) const CSS: &str = "
:root { color-scheme: light dark; --line: #8884; --dim: #777; --good: #18794e; --bad: #b42318; --warn: #9a6700 }
@media (prefers-color-scheme: dark) { :root { --dim: #999; --good: #4cc38a; --bad: #ff8a80; --warn: #e2b203 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.4rem; margin: 0 }
h2 { font-size: 1.05rem; margin: 2rem 0 0 }
p { margin: .25rem 0 .75rem; max-width: 46rem }
.dim { color: var(--dim) }
.good { color: var(--good) }
.bad { color: var(--bad) }
.warn { color: var(--warn) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--dim); font-size: .85rem; white-space: nowrap }
td.name, td.wide .dim { white-space: nowrap }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code, .id { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere }
.id { min-width: 9rem }
form.right { justify-content: flex-end }
form { display: flex; flex-wrap: wrap; gap: .5rem; margin: .5rem 0 }
button, input, select { font: inherit; padding: .35rem .7rem }
input[name=id] { flex: 1 1 14rem; min-width: 0 }
button { cursor: pointer }
footer { margin: 2rem 0; color: var(--dim) }
@media (max-width: 40rem) {
  body { font-size: 14px }
  th, td { padding-right: .5rem }
  .wide { display: none }
  .id { min-width: 6.5rem }
  th { white-space: normal }
}
";
