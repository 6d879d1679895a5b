//! Holds the sources to the table of rooms.
//!
//! 1. A room is a file or a folder directly in `src`. It stands on a floor of the table below; one
//!    that is not in the table fails the test.
//! 2. Arrows only go down: a room uses rooms on lower floors. Rooms of one floor do not use each
//!    other, but for modules of one folder.
//! 3. Inside the crate an item is named by its room (`crate::key::DedupKey`), not by what `lib`
//!    exports it as: that would be an arrow to the top floor.
//! 4. Types of `sqlx` and `axum_core` appear only in the rooms that are made of them.
//! 5. A file has at most 600 lines, its tests included.
//!
//! Rules 2 to 4 are about what ships: tests are left out, and so are comments, since links between
//! documents go anywhere.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Every room with its floor.
const ROOMS: &[(&str, u8)] = &[
    ("lib", 6),
    ("layer", 5),
    ("extract", 5),
    ("deduplicator", 5),
    ("conformance", 5),
    ("ledger", 4),
    ("purger", 4),
    ("adapter", 3),
    ("delivery", 3),
    ("provider", 2),
    ("observe", 2),
    ("key", 1),
    ("error", 0),
];

/// Foreign crates, and the modules that may name them.
const FOREIGN: &[(&str, &[&str])] = &[
    ("sqlx", &["adapter", "ledger::transaction", "extract", "deduplicator"]),
    ("axum_core", &["extract"]),
];

const MOST_LINES: usize = 600;

/// A file of `src`, as tokens.
struct Source {
    path: String,
    text: String,
    /// `["ledger", "lease"]` for `ledger/lease.rs`, `["ledger"]` for `ledger/mod.rs`.
    module: Vec<String>,
}

impl Source {
    fn room(&self) -> &str {
        &self.module[0]
    }
}

/// An arrow from a room to another.
struct Arrow {
    line: usize,
    to: String,
}

#[test]
fn every_room_is_in_the_table() {
    let mut faults = String::new();
    for source in sources() {
        if floor(source.room()).is_none() {
            let (path, room) = (&source.path, source.room());
            writeln!(faults, "{path}:1: the room `{room}` is not in the table of rooms").unwrap();
        }
    }
    assert!(faults.is_empty(), "\n{faults}");
}

#[test]
fn arrows_only_go_down() {
    let mut faults = String::new();
    for source in sources() {
        let Some(from) = floor(source.room()) else { continue };
        let mut found = Vec::new();
        arrows(&source.module, tokens(&source), &mut found);
        for Arrow { line, to } in found {
            if let Err(rule) = allowed(source.room(), from, &to) {
                writeln!(faults, "{}:{line}: {rule}", source.path).unwrap();
            }
        }
    }
    assert!(faults.is_empty(), "\n{faults}");
}

#[test]
fn foreign_types_stay_in_their_rooms() {
    let mut faults = String::new();
    for source in sources() {
        let module = source.module.join("::");
        for (name, homes) in FOREIGN {
            let at_home = |home: &&str| {
                module
                    .strip_prefix(home)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            if homes.iter().any(at_home) {
                continue;
            }
            for line in lines_with(name, tokens(&source)) {
                let homes = homes.join("`, `");
                writeln!(faults, "{}:{line}: `{name}` is named outside `{homes}`", source.path)
                    .unwrap();
            }
        }
    }
    assert!(faults.is_empty(), "\n{faults}");
}

#[test]
fn no_file_is_too_long_to_be_read() {
    let mut faults = String::new();
    for source in sources() {
        let lines = source.text.lines().count();
        if lines > MOST_LINES {
            let path = &source.path;
            writeln!(faults, "{path}:{lines}: a file has at most {MOST_LINES} lines").unwrap();
        }
    }
    assert!(faults.is_empty(), "\n{faults}");
}

/// The rule that an arrow from this room to `to` breaks.
fn allowed(room: &str, from: u8, to: &str) -> Result<(), String> {
    if room == to {
        return Ok(());
    }
    let Some(floor) = floor(to) else {
        return Err(format!(
            "`{room}` names `crate::{to}`: an item is named by its room, not as `lib` exports it"
        ));
    };
    if floor < from {
        return Ok(());
    }
    let how = if floor == from { "beside" } else { "above" };
    Err(format!(
        "`{room}` (floor {from}) uses `{to}` (floor {floor}) {how} it: arrows only go down"
    ))
}

fn floor(room: &str) -> Option<u8> {
    ROOMS.iter().find(|(name, _)| *name == room).map(|(_, floor)| *floor)
}

// Reading

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    assert!(files.len() > ROOMS.len(), "the sources were not found in {}", root.display());
    files.into_iter().map(|file| source(&root, &file)).collect()
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

fn source(root: &Path, file: &Path) -> Source {
    let inside = file.strip_prefix(root).unwrap();
    let path = format!("src/{}", inside.display());
    Source { path, text: fs::read_to_string(file).unwrap(), module: module_of(inside) }
}

/// The module that a file below `src` holds.
fn module_of(file: &Path) -> Vec<String> {
    let mut module: Vec<String> = file
        .with_extension("")
        .components()
        .map(|component| component.as_os_str().to_str().unwrap().to_owned())
        .collect();
    if module.last().is_some_and(|name| name == "mod") {
        module.pop();
    }
    module
}

/// The file's tokens: no comments, and strings as one token each.
fn tokens(source: &Source) -> TokenStream {
    source.text.parse().unwrap_or_else(|error| panic!("{}: {error}", source.path))
}

/// The rooms that these tokens of `module` name, through `crate::` or through a `super::` that
/// leads out of the room.
fn arrows(module: &[String], tokens: TokenStream, found: &mut Vec<Arrow>) {
    let tokens = without_tests(tokens);
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Group(group) => arrows(module, group.stream(), found),
            TokenTree::Ident(ident) if ident == "mod" => {
                // What is written inside is one step further from the root.
                if let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(group))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                {
                    let inner: Vec<_> = module.iter().cloned().chain([name.to_string()]).collect();
                    arrows(&inner, group.stream(), found);
                    at += 2;
                }
            }
            // `$crate` is for the code of others, who see what `lib` exports.
            TokenTree::Ident(ident) if ident == "crate" && !is_punct(&tokens, at, '$') => {
                rooms_after(&tokens[at + 1..], found);
            }
            TokenTree::Ident(ident) if ident == "super" => {
                let mut steps = 1;
                while is_super(&tokens, at + 3) {
                    steps += 1;
                    at += 3;
                }
                if steps >= module.len() {
                    rooms_after(&tokens[at + 1..], found);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// Whether the token before `at` is this one.
fn is_punct(tokens: &[TokenTree], at: usize, punct: char) -> bool {
    let before = at.checked_sub(1).and_then(|before| tokens.get(before));
    matches!(before, Some(TokenTree::Punct(before)) if before.as_char() == punct)
}

fn is_super(tokens: &[TokenTree], at: usize) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Ident(ident)) if ident == "super")
}

/// The rooms in what follows the root of a path: `::key::DedupKey` or `::{error::Error, key}`.
fn rooms_after(tokens: &[TokenTree], found: &mut Vec<Arrow>) {
    let [TokenTree::Punct(one), TokenTree::Punct(two), next, ..] = tokens else { return };
    if (one.as_char(), two.as_char()) != (':', ':') {
        return;
    }
    match next {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
            let mut first = true;
            for token in group.stream() {
                match token {
                    TokenTree::Punct(punct) if punct.as_char() == ',' => first = true,
                    token if first => {
                        found.push(arrow(&token));
                        first = false;
                    }
                    _ => {}
                }
            }
        }
        token => found.push(arrow(token)),
    }
}

fn arrow(token: &TokenTree) -> Arrow {
    Arrow { line: token.span().start().line, to: token.to_string() }
}

/// The lines that name a crate outside of tests.
fn lines_with(name: &str, tokens: TokenStream) -> Vec<usize> {
    let mut lines = Vec::new();
    for token in without_tests(tokens) {
        match token {
            TokenTree::Group(group) => lines.extend(lines_with(name, group.stream())),
            TokenTree::Ident(ident) if ident == name => lines.push(ident.span().start().line),
            _ => {}
        }
    }
    lines
}

/// Without the items under `#[cfg(test)]`: each up to its block or its semicolon.
fn without_tests(tokens: TokenStream) -> Vec<TokenTree> {
    let mut kept = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let hash = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '#');
        if !hash || tokens.peek().is_none_or(|next| next.to_string() != "[cfg (test)]") {
            kept.push(token);
            continue;
        }
        for skipped in tokens.by_ref() {
            match skipped {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
                TokenTree::Punct(punct) if punct.as_char() == ';' => break,
                _ => {}
            }
        }
    }
    kept
}

// The rules on samples that break them: a check that finds nothing may be one that cannot find
// anything.

/// What is wrong with a file of this text.
fn faults(path: &str, text: &str) -> Vec<String> {
    let module = module_of(Path::new(path));
    let mut found = Vec::new();
    arrows(&module, text.parse().unwrap(), &mut found);
    let from = floor(&module[0]).unwrap();
    let broken = |arrow: &Arrow| allowed(&module[0], from, &arrow.to).is_err();
    found
        .iter()
        .filter(|arrow| broken(arrow))
        .map(|Arrow { line, to }| format!("{line} {to}"))
        .collect()
}

#[test]
fn the_rules_find_what_breaks_them() {
    for (path, text, expected) in [
        ("key/part.rs", "use crate::error::KeyError;\nuse crate::adapter::Seen;", "2 adapter"),
        (
            "key/part.rs",
            "use crate::{error, adapter::{Seen, Token},\n provider};",
            "1 adapter,2 provider",
        ),
        ("adapter/memory.rs", "use crate::delivery::Delivery;", "1 delivery"),
        ("purger.rs", "fn f() {\n let x = crate::ledger::f();\n}", "2 ledger"),
        ("extract.rs", "use super::layer::Layer;", "1 layer"),
        ("key/part.rs", "use super::super::observe;", "1 observe"),
        ("key/mod.rs", "use super::observe;", "1 observe"),
        ("key/part.rs", "mod inner { use super::super::super::observe; }", "1 observe"),
        ("delivery.rs", "use crate::DedupKey;", "1 DedupKey"),
        ("observe.rs", "use crate::newroom;", "1 newroom"),
        ("observe.rs", "use crate::*;", "1 *"),
        // Nothing wrong.
        ("layer/future.rs", "use crate::layer::config;\nuse super::{body, gate};", ""),
        ("key/part.rs", "use super::id::DedupKey; use crate::key::id;", ""),
        ("key/part.rs", "mod inner { use super::super::id; }", ""),
        ("adapter/sqlite/store.rs", "use super::super::sql; use super::schema;", ""),
        (
            "observe.rs",
            "//! [`crate::layer`]\n/// [crate::DedupLayer]\nconst S: &str = \"crate::layer\";",
            "",
        ),
        ("observe.rs", "pub(crate) fn f() {} pub(in crate::observe) fn g() {}", ""),
        ("observe.rs", "#[cfg(test)]\nmod tests { use crate::layer::X; }\nfn f() {}", ""),
        ("observe.rs", "#[cfg(test)]\nuse crate::layer::X;", ""),
        ("error.rs", "macro_rules! m { () => { $crate::DedupKey } }", ""),
    ] {
        assert_eq!(faults(path, text).join(","), expected, "{path}: {text}");
    }
    let foreign = "use sqlx::Row;\n#[cfg(test)]\nmod tests { use sqlx::Row; }\n// sqlx\n";
    assert_eq!(lines_with("sqlx", foreign.parse().unwrap()), [1]);
}
