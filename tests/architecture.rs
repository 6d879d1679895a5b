//! Checks the dependencies between the modules of `src`.
//!
//! 1. Each module of a folder in [`LEVELS`] has a level there. A module that has none fails the test, and so does a
//!    level or a home in [`FOREIGN`] without a module.
//! 2. A module uses modules of lower levels only, in its own folder and in others. A folder counts as
//!    one module for everything outside it.
//! 3. No files import each other in a circle, in whatever folder they are. The same holds in `cli/src`,
//!    `conformance/src`, `inbox/src`, `judge/src` and `soak`.
//! 4. Inside the crate, a path names the module of an item (`crate::key::DedupKey`). The name that
//!    `lib` exports (`crate::DedupKey`) belongs to the highest level, so no module may use it.
//! 5. A glob import of our own modules hides what is used, so it fails the test.
//! 6. Types of `sqlx` and `axum_core` appear only in the modules of [`FOREIGN`].
//! 7. A file has at most 800 lines, in `src`, `tests`, `soak`, `benches`, `examples`, `cli`, `conformance`,
//!    `inbox` and `judge`.
//! 8. `tests/README.md` names each file of `tests`, and no other.
//! 9. The name of a type, a trait or an alias stands once in `src`. Associated types are left out.
//! 10. A comment has at most 100 columns, in `src` and `inbox/src`. A row of a table and a line with a
//!     URL may be longer.
//!
//! Rules 1 to 6 and 9 apply to the library as it ships: tests and comments are left out. The command in `cli` and the
//! suite in `conformance` are packages of their own: the compiler lets them use the public API only.
//!
//! An edge leads to the file that defines the item. If a `mod.rs` re-exports the item, the check
//! follows the re-export; so a `mod.rs` that only re-exports belongs to no circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Every folder whose modules have levels, the lowest first. Modules of one level do not use each other. Rule 3 alone
/// holds for the other folders.
const LEVELS: &[(&str, &str)] = &[
    (
        "",
        "error < key < delivery observe provider < adapter < replay < ledger < run < layer < verify \
         < deduplicator extract idempotency testing internals < lib",
    ),
    (
        "adapter",
        "stored < terms replies < own_completion < completion < contract < maintenance \
         < around transaction < sql < memory sqlite postgres redis < connect",
    ),
    (
        "ledger",
        "call times < contract held < background completion renewal < arrival < hold < resolve \
         < claim < begin",
    ),
    (
        "verify",
        "error < public_url < received < key < adyen data twilio < verifier < echo layer sign",
    ),
    (
        "layer",
        "end mode < policy body gate paths < config < answer handle < builder stored < request < settings < delivery \
         < shadow < admit < service",
    ),
];

/// Foreign crates, and the modules that may name them.
const FOREIGN: &[(&str, &[&str])] = &[
    ("sqlx", &["adapter", "ledger::completion", "lib"]),
    ("axum_core", &["extract", "layer::body"]),
    ("redis", &["adapter", "internals", "lib"]),
];

const MAX_LINES: usize = 800;

const MAX_COLUMNS: usize = 100;

#[test]
fn modules_have_levels_use_lower_ones_only_and_import_each_other_in_no_circle() {
    let sources = Crate::read();
    let uses = sources.uses();
    let faults = [
        sources.without_level(),
        sources.without_module(),
        uses.iter().filter_map(|used| sources.level_fault(used)).collect(),
        sources.circles(uses),
    ];
    assert_none(&faults.concat());
}

#[test]
fn files_of_the_other_packages_import_each_other_in_no_circle() {
    for folder in ["cli/src", "conformance/src", "inbox/src", "judge/src", "soak"] {
        let files = Crate::read_in(folder, 10);
        assert_none(&files.circles(files.uses()));
    }
}

#[test]
fn foreign_types_stay_in_their_modules() {
    let mut faults = Vec::new();
    for source in &Crate::read().shipped {
        let module = source.module.join("::");
        for (name, homes) in FOREIGN {
            let is_home = |home: &&str| {
                module
                    .strip_prefix(home)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            if homes.iter().any(is_home) {
                continue;
            }
            for (_, line) in source.tokens.iter().filter(|(token, _)| token == name) {
                let homes = homes.join("`, `");
                faults.push(format!("{}:{line}: only `{homes}` may name `{name}`", source.path));
            }
        }
    }
    assert_none(&faults);
}

#[test]
fn name_of_a_type_stands_once() {
    let sources = Crate::read();
    let mut homes: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for source in &sources.shipped {
        for (name, line) in source.types() {
            homes.entry(name).or_default().push(format!("{}:{line}", source.path));
        }
    }
    assert!(homes.len() > 200, "only {} types", homes.len());
    let twice = homes.iter().filter(|(_, homes)| homes.len() > 1);
    let faults: Vec<_> =
        twice.map(|(name, homes)| format!("{}: `{name}`", homes.join(", "))).collect();
    assert_none(&faults);
}

#[test]
fn no_file_is_longer_than_800_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in [
        "src",
        "tests",
        "soak",
        "benches",
        "examples",
        "cli/src",
        "cli/tests",
        "conformance/src",
        "inbox",
        "judge",
    ] {
        rust_files(&root.join(folder), &mut files);
    }
    let mut faults = Vec::new();
    for file in files {
        let lines = fs::read_to_string(&file).unwrap().lines().count();
        if lines > MAX_LINES {
            let path = file.strip_prefix(root).unwrap().display();
            faults.push(format!("{path}:{lines}: a file has at most {MAX_LINES} lines"));
        }
    }
    assert_none(&faults);
}

#[test]
fn no_comment_is_wider_than_100_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "inbox/src"] {
        rust_files(&root.join(folder), &mut files);
    }
    let mut faults = Vec::new();
    for file in files {
        for (number, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            let text = comment.trim_start_matches(['/', '!']).trim();
            let may_be_long = text.starts_with('|') || text.contains("https://");
            if line.chars().count() > MAX_COLUMNS && !may_be_long {
                let (path, number) = (file.strip_prefix(root).unwrap().display(), number + 1);
                faults.push(format!("{path}:{number}: wrap the comment at {MAX_COLUMNS} columns"));
            }
        }
    }
    assert_none(&faults);
}

#[test]
fn map_of_the_tests_names_each_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    let files = files.iter().map(|file| file.strip_prefix(&root).unwrap().with_extension(""));
    let files = files.filter(|file| !file.starts_with("support"));
    let files = files.filter(|file| !file.ends_with("main") && !file.ends_with("mod"));
    let files: BTreeSet<_> = files.map(|file| file.to_str().unwrap().to_owned()).collect();
    let map = fs::read_to_string(root.join("README.md")).unwrap();
    let (_, map) = map.split_once("## Where is the test").expect("the map");
    let rows = map.lines().filter(|line| line.starts_with('|'));
    let named = rows.flat_map(|row| row.rsplit('|').nth(1).unwrap().split('`').skip(1).step_by(2));
    let named: BTreeSet<_> = named.map(str::to_owned).collect();
    let wrong: Vec<_> = files.symmetric_difference(&named).collect();
    assert!(wrong.is_empty(), "named or there, and not both: {wrong:?}");
}

#[track_caller]
fn assert_none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// A file of one of the folders of rule 3.
struct Source {
    path: String,
    tokens: Vec<Token>,
    /// The items under `#[cfg(test)]`.
    tests: Vec<Vec<Token>>,
    /// `["ledger", "held"]` for `ledger/held.rs`, `["ledger"]` for `ledger/mod.rs`.
    module: Vec<String>,
}

/// A token, or one end of a group, and its line. There are no comments, and a string is one token.
type Token = (String, usize);

/// A path from the root of the crate, its line, and the name that it has here: that after `as`, or its last one.
type Named = (Vec<String>, usize, String);

/// An item that a file uses: where it says so, and the file that defines the item.
struct Use {
    from: usize,
    line: usize,
    to: usize,
    path: String,
}

struct Crate {
    /// The files of `src` that are not tests.
    shipped: Vec<Source>,
}

impl Crate {
    fn read() -> Self {
        Self::read_in("src", 40)
    }

    fn read_in(folder: &str, least: usize) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let mut files = Vec::new();
        rust_files(&root, &mut files);
        assert!(files.len() >= least, "the sources were not found in {}", root.display());
        let all: Vec<_> = files
            .iter()
            .map(|file| {
                let inside = file.strip_prefix(&root).unwrap();
                let path = format!("{folder}/{}", inside.display());
                let text = fs::read_to_string(file).unwrap().parse();
                let mut all = Vec::new();
                flatten(text.unwrap_or_else(|error| panic!("{path}: {error}")), &mut all);
                let (tokens, tests) = without_tests(&all);
                Source { path, tokens, tests, module: module_of(inside) }
            })
            .collect();
        let mut tests = BTreeSet::new();
        for source in &all {
            for item in &source.tests {
                if let [.., (module, _), (name, _), (end, _)] = &item[..]
                    && (module, end) == (&"mod".to_owned(), &";".to_owned())
                {
                    tests.insert([source.parent_of_items(), vec![name.clone()]].concat());
                }
            }
        }
        let is_test = |source: &Source| tests.iter().any(|test| source.module.starts_with(test));
        Self { shipped: all.into_iter().filter(|source| !is_test(source)).collect() }
    }

    fn file_of(&self, module: &[String]) -> Option<usize> {
        self.shipped.iter().position(|source| source.module == module)
    }

    fn without_level(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (folder, levels) in LEVELS {
            let folder: Vec<_> = folder.split_terminator("::").map(str::to_owned).collect();
            for source in &self.shipped {
                let Some(name) = source.module.strip_prefix(&folder[..]).and_then(<[_]>::first)
                else {
                    continue;
                };
                if level(levels, name).is_none() {
                    let path = &source.path;
                    faults.push(format!("{path}:1: `{name}` has no level: see LEVELS"));
                }
            }
        }
        faults
    }

    /// The modules that [`LEVELS`] and [`FOREIGN`] name, and that do not exist.
    fn without_module(&self) -> Vec<String> {
        let levels =
            LEVELS.iter().flat_map(|(folder, levels)| {
                let names = levels.split_whitespace().filter(|word| *word != "<");
                names.map(move |name| {
                    if folder.is_empty() { name.to_owned() } else { format!("{folder}::{name}") }
                })
            });
        let homes = FOREIGN.iter().flat_map(|(_, homes)| *homes).map(|home| (*home).to_owned());
        let is_missing = |module: &String| {
            let module: Vec<_> = module.split("::").map(str::to_owned).collect();
            !self.shipped.iter().any(|source| source.module.starts_with(&module))
        };
        let missing = levels.chain(homes).filter(is_missing);
        missing
            .map(|module| format!("tests/architecture.rs: no module `{module}` exists"))
            .collect()
    }

    /// Everything that a file uses of another file of the crate.
    fn uses(&self) -> Vec<Use> {
        let paths: Vec<_> = self.shipped.iter().map(|source| self.paths(source)).collect();
        let named = |paths: &Vec<Named>| {
            paths.iter().map(|(path, _, name)| (name.clone(), path.clone())).collect()
        };
        let imports: Vec<_> = paths.iter().map(named).collect();
        let mut uses = Vec::new();
        for (from, paths) in paths.iter().enumerate() {
            for (segments, line, _) in paths {
                let to = self.definition(&imports, segments, 8);
                if to != from {
                    uses.push(Use { from, line: *line, to, path: segments.join("::") });
                }
            }
        }
        uses
    }

    /// The paths in a file: after `crate::`, `self::`, `super::`, or the name of a child module.
    fn paths(&self, source: &Source) -> Vec<Named> {
        let (tokens, mut found) = (&source.tokens, Vec::new());
        let is = |at: usize, token| tokens.get(at).is_some_and(|(found, _)| found == token);
        // The blocks around a token. That of an inner module is one step further from the root.
        let (mut blocks, mut at) = (Vec::new(), 0);
        while at < tokens.len() {
            match tokens[at].0.as_str() {
                "{" if at > 1 && is(at - 2, "mod") => blocks.push(Some(tokens[at - 1].0.clone())),
                "{" => blocks.push(None),
                "}" => drop(blocks.pop()),
                _ => {}
            }
            at += 1;
            let begins = is(at, "::") && !(at > 1 && is(at - 2, "::"));
            let Some(start) = begins.then(|| tokens[at - 1].0.as_str()) else { continue };
            let inner = blocks.iter().flatten().cloned();
            let module: Vec<_> = source.parent_of_items().into_iter().chain(inner).collect();
            let child = [&module[..], &[start.to_owned()]].concat();
            let base = match start {
                // `$crate` is for users, who see what `lib` exports. `pub(in crate::key)` uses nothing.
                "crate" if at > 1 && ["$", "in"].iter().any(|it| is(at - 2, it)) => None,
                "crate" => Some(Vec::new()),
                "self" => Some(module),
                "super" => Some(module[..module.len().saturating_sub(1)].to_vec()),
                _ => self.file_of(&child).filter(|_| child != source.module).map(|_| child),
            };
            if let Some(base) = base {
                at = expand(tokens, at + 1, base, &mut found);
            }
        }
        found
    }

    /// The file that defines an item. A re-export of a `mod.rs` leads to another file.
    fn definition(
        &self,
        imports: &[BTreeMap<String, Vec<String>>],
        path: &[String],
        steps: u8,
    ) -> usize {
        let lib = self.file_of(&["lib".to_owned()]);
        let found = (1..=path.len())
            .rev()
            .find_map(|length| Some((length, self.file_of(&path[..length])?)));
        let Some((length, file)) = found else { return lib.expect("a crate has a `lib.rs`") };
        let source = &self.shipped[file];
        let exported = path.get(length).and_then(|name| imports[file].get(name));
        match exported {
            Some(origin) if steps > 0 && source.path.ends_with("/mod.rs") && origin != path => {
                self.definition(imports, origin, steps - 1)
            }
            _ => file,
        }
    }

    fn level_fault(&self, used: &Use) -> Option<String> {
        let (from, to) = (&self.shipped[used.from], &self.shipped[used.to]);
        let fault = |rule: String| Some(format!("{}:{}: {rule}", from.path, used.line));
        let (using, path) = (from.module.join("::"), &used.path);
        if path.ends_with('*') {
            return fault(format!("`{path}` imports by a glob"));
        }
        if to.module == ["lib"] {
            return fault(format!("`crate::{path}` is not named by its module"));
        }
        let same = from.module.iter().zip(&to.module).take_while(|(one, other)| one == other);
        let folder = &from.module[..same.count()];
        let Some(user) = from.module.get(folder.len()) else {
            // A `mod.rs` stands above all modules of its folder.
            return None;
        };
        let (_, levels) = LEVELS.iter().find(|(name, _)| *name == folder.join("::"))?;
        let Some(target) = to.module.get(folder.len()) else {
            return fault(format!("`{using}` uses `{path}` of the `mod.rs` above it"));
        };
        // Rule 1 reports a module without a level.
        let (higher, lower) = (level(levels, user)?, level(levels, target)?);
        (lower >= higher).then(|| {
            format!(
                "{}:{}: `{user}` (level {higher}) uses `{target}` (level {lower}): `{path}`",
                from.path, used.line
            )
        })
    }

    /// The uses that stand in circles, or between two of them.
    fn circles(&self, mut uses: Vec<Use>) -> Vec<String> {
        let mut before = usize::MAX;
        while uses.len() < before {
            before = uses.len();
            // No circle passes a file that uses nothing more, or that nothing uses any more.
            let using: BTreeSet<_> = uses.iter().map(|used| used.from).collect();
            let used: BTreeSet<_> = uses.iter().map(|used| used.to).collect();
            uses.retain(|it| using.contains(&it.to) && used.contains(&it.from));
        }
        let path = |file: usize| &self.shipped[file].path;
        let uses = uses.iter();
        uses.map(|it| format!("a circle: {}:{} uses {}", path(it.from), it.line, path(it.to)))
            .collect()
    }
}

impl Source {
    /// The module that the file's items are in. Those of `lib` are in the root.
    fn parent_of_items(&self) -> Vec<String> {
        if self.module == ["lib"] { Vec::new() } else { self.module.clone() }
    }

    /// The types, traits and aliases of the file's modules, each with its line. A call of a macro
    /// may define some.
    fn types(&self) -> Vec<(&str, usize)> {
        let text = |at: usize| self.tokens.get(at).map_or("", |(token, _)| token.as_str());
        // Whether each block around a token is a module or a call of a macro.
        let (mut blocks, mut types) = (Vec::new(), Vec::new());
        for (at, (token, line)) in self.tokens.iter().enumerate() {
            match token.as_str() {
                "{" => blocks.push(at > 1 && (text(at - 2) == "mod" || text(at - 1) == "!")),
                "(" | "[" => blocks.push(false),
                "}" | ")" | "]" => drop(blocks.pop()),
                "struct" | "enum" | "union" | "trait" | "type"
                    if blocks.iter().all(|is_module| *is_module)
                        && text(at + 1).starts_with(|char: char| char.is_alphabetic()) =>
                {
                    types.push((text(at + 1), *line));
                }
                _ => {}
            }
        }
        types
    }
}

/// Reads the rest of a path: `DedupKey`, `{error::Error, key}`, `gate as door`. Returns the place after it.
fn expand(tokens: &[Token], at: usize, mut base: Vec<String>, found: &mut Vec<Named>) -> usize {
    let text = |at: usize| tokens.get(at).map_or("", |(token, _)| token.as_str());
    match text(at) {
        "{" => {
            let mut at = at + 1;
            while text(at) != "}" {
                at = if text(at) == "," { at + 1 } else { expand(tokens, at, base.clone(), found) };
            }
            return at + 1;
        }
        "super" => drop(base.pop()),
        "self" => {}
        // `Type::<T>`: the path ends here.
        "<" => {}
        name => base.push(name.to_owned()),
    }
    if text(at + 1) == "::" {
        return expand(tokens, at + 2, base, found);
    }
    let name = if text(at + 1) == "as" { text(at + 2) } else { base.last().map_or("", |it| it) };
    found.push((base.clone(), tokens[at].1, name.to_owned()));
    at + if text(at + 1) == "as" { 3 } else { 1 }
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    for token in stream {
        let line = token.span().start().line;
        match token {
            TokenTree::Group(group) => {
                let [open, close] = match group.delimiter() {
                    Delimiter::Brace => ["{", "}"],
                    Delimiter::Bracket => ["[", "]"],
                    _ => ["(", ")"],
                };
                tokens.push((open.to_owned(), line));
                flatten(group.stream(), tokens);
                tokens.push((close.to_owned(), line));
            }
            token => match tokens.last_mut() {
                Some((before, _)) if before == ":" && token.to_string() == ":" => before.push(':'),
                _ => tokens.push((token.to_string(), line)),
            },
        }
    }
}

/// The tokens that ship, and the items under `#[cfg(test)]`: each ends with its block or semicolon.
fn without_tests(tokens: &[Token]) -> (Vec<Token>, Vec<Vec<Token>>) {
    const CFG: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut shipped, mut tests, mut at) = (Vec::new(), Vec::new(), 0);
    while at < tokens.len() {
        let rest = tokens[at..].iter().map(|(token, _)| token.as_str());
        if !rest.take(CFG.len()).eq(CFG) {
            shipped.push(tokens[at].clone());
            at += 1;
            continue;
        }
        let (start, mut depth) = (at + CFG.len(), 0);
        at = start;
        loop {
            match tokens[at].0.as_str() {
                "{" | "[" | "(" => depth += 1,
                "}" | "]" | ")" => depth -= 1,
                _ => {}
            }
            at += 1;
            if depth == 0 && ["}", ";"].contains(&tokens[at - 1].0.as_str()) {
                break;
            }
        }
        tests.push(tokens[start..at].to_vec());
    }
    (shipped, tests)
}

fn level(levels: &str, name: &str) -> Option<usize> {
    levels.split(" < ").position(|level| level.split(' ').any(|module| module == name))
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The module that a file below `src` holds.
fn module_of(file: &Path) -> Vec<String> {
    let file = file.with_extension("");
    let names = file.components().map(|component| component.as_os_str().to_str().unwrap());
    let mut module: Vec<_> = names.map(str::to_owned).collect();
    match module.last_mut() {
        Some(name) if name == "mod" => drop(module.pop()),
        // The root of a program is its library.
        Some(name) if name == "main" && file.components().count() == 1 => "lib".clone_into(name),
        _ => {}
    }
    module
}
