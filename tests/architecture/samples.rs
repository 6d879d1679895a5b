//! The checks on samples that break the rules. A check that never fails proves nothing.

use crate::Crate;
use crate::paths::lines_with;

fn sample(files: &[(&str, &str)]) -> Crate {
    let lib = ("lib.rs".to_owned(), String::new());
    let files = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
    Crate::of("src", files.chain([lib]))
}

/// The faults of one file among others, as the line and the path that breaks a rule.
fn level_faults(path: &str, text: &str) -> String {
    let others = [
        "error.rs",
        "key/mod.rs",
        "key/id.rs",
        "observe.rs",
        "adapter/contract.rs",
        "adapter/stored.rs",
        "adapter/mod.rs",
        "ledger/mod.rs",
        "layer/gate.rs",
        "layer/config.rs",
    ];
    let exports = "mod contract; mod stored; pub use contract::Seen;";
    let others = others.into_iter().filter(|other| *other != path);
    let others = others.map(|other| (other, if other == "adapter/mod.rs" { exports } else { "" }));
    let sources = sample(&others.chain([(path, text)]).collect::<Vec<_>>());
    let uses = sources.uses();
    let broken = uses.iter().filter(|used| sources.level_fault(used).is_some());
    let broken: Vec<_> = broken.map(|used| format!("{} {}", used.line, used.path)).collect();
    broken.join(", ")
}

#[test]
fn level_check_finds_each_use_of_a_higher_or_equal_level() {
    for (path, text, expected) in [
        (
            "key/id.rs",
            "use crate::{error, adapter::{Seen, Token},\n observe};",
            "1 adapter::Seen, 1 adapter::Token, 2 observe",
        ),
        ("error.rs", "fn f() {\n let x = crate::observe::f();\n}", "2 observe::f"),
        ("key/id.rs", "mod inner { use super::super::super::observe; }", "1 observe"),
        ("observe.rs", "use crate::DedupKey;", "1 DedupKey"),
        ("layer/config.rs", "use super::gate::*;", "1 layer::gate::*"),
        ("layer/gate.rs", "use super::config::Config;", "1 layer::config::Config"),
        ("adapter/stored.rs", "use super::Seen;", "1 adapter::Seen"),
        // Nothing is wrong.
        ("layer/config.rs", "use crate::layer::gate;\nuse super::gate::Gate;", ""),
        ("ledger/mod.rs", "use crate::adapter::Seen; mod lease; pub use lease::Lease;", ""),
        ("observe.rs", "//! [`crate::layer`]\nconst S: &str = \"crate::layer\";", ""),
        ("observe.rs", "pub(in crate::observe) fn g() {}", ""),
        ("observe.rs", "#[cfg(test)]\nmod tests { use crate::layer::X; }\nfn f() {}", ""),
        ("error.rs", "macro_rules! m { () => { $crate::DedupKey } }", ""),
    ] {
        assert_eq!(level_faults(path, text), expected, "{path}: {text}");
    }
    let foreign = "use sqlx::Row;\n#[cfg(test)]\nmod tests { use sqlx::Row; }\n// sqlx\n";
    assert_eq!(lines_with("sqlx", foreign.parse().unwrap()), [1]);
}

#[test]
fn circle_check_finds_each_circle() {
    let circle = |files: &[(&str, &str)]| sample(files).circles();
    for (files, expected) in [
        (
            &[
                ("key/a.rs", "use super::b::B;"),
                ("key/b.rs", "fn f() -> super::c::C {}"),
                ("key/c.rs", "use super::{a::{A, Z}};"),
            ][..],
            "a circle: src/key/a.rs:1 -> src/key/b.rs:1 -> src/key/c.rs:1",
        ),
        // An item of the `mod.rs` itself, which uses its child.
        (
            &[("key/mod.rs", "mod a;\nuse a::A;\npub struct K(A);"), ("key/a.rs", "use super::K;")],
            "a circle: src/key/mod.rs:2 -> src/key/a.rs:1",
        ),
        // Through a re-export.
        (
            &[
                ("key/mod.rs", "mod a; mod b; pub use a::A; pub use b::B as C;"),
                ("key/a.rs", "use crate::key::{\nC};"),
                ("key/b.rs", "use {crate::key::A};"),
            ],
            "a circle: src/key/a.rs:2 -> src/key/b.rs:1",
        ),
        // Between folders.
        (
            &[("key/a.rs", "use crate::provider::p::P;"), ("provider/p.rs", "use crate::key::a;")],
            "a circle: src/key/a.rs:1 -> src/provider/p.rs:1",
        ),
    ] {
        assert_eq!(circle(files), [expected]);
    }
    // Siblings of one re-export, a module that names itself, and a test.
    for files in [
        &[
            ("key/mod.rs", "mod a; mod b; pub use a::A; pub use b::B;"),
            ("key/a.rs", "use crate::key::B;"),
            ("key/b.rs", ""),
        ][..],
        &[("key/a.rs", "use self::inner::X; use crate::key::a::Y; mod inner {}")],
        &[
            ("key/mod.rs", "mod a; #[cfg(test)] mod model;"),
            ("key/a.rs", "#[cfg(test)]\nuse super::model::M;"),
            ("key/model.rs", "use super::a::A;"),
        ],
    ] {
        assert!(circle(files).is_empty(), "{files:?}");
    }
}
