//! Writes the figures of the last run into one table.
//!
//! `cargo bench --bench table` prints the rows and nothing else to stdout. With `-- --readme`, it writes them into
//! `README.md`, where a figure that was not measured keeps its row. So this command measures everything and updates
//! `benches/README.md`:
//!
//! ```console
//! $ cargo bench && cargo bench --bench table -- --readme
//! ```
//!
//! Under `cargo test`, it checks that the README has a row for every figure, with the same text.

use std::fs;

#[path = "shared/mod.rs"]
mod shared;

use shared::goals::GOALS;
use shared::ratios::{self, Figures};
use shared::run::Run;

/// The README's lines before and after the generated section.
const BEGIN: &str = "<!-- `cargo bench --bench table -- --readme` writes what follows. -->\n";
const END: &str = "<!-- Up to here. -->\n";
const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
const HEAD: &str = "\n| figure | what over what | measured | commit |\n|---|---|---|---|\n";

fn main() {
    let run = Run::from_args();
    let readme = fs::read_to_string(README).expect("the README");
    if run.is_test() {
        let same = format!("{BEGIN}{HEAD}{}\n{END}", rows(&Figures::new(), &readme));
        assert!(readme.contains(&same), "the README has these rows, and no others: {same}");
        return;
    }
    let rows = rows(&ratios::read(&ratios::file()), &readme);
    print!("{rows}");
    if std::env::args().any(|arg| arg == "--readme") {
        let lines = "the README has the two lines around the table";
        let (before, rest) = readme.split_once(BEGIN).expect(lines);
        let (_, after) = rest.split_once(END).expect(lines);
        fs::write(README, format!("{before}{BEGIN}{HEAD}{rows}\n{END}{after}"))
            .expect("the README");
        eprintln!("\nwritten: {README}");
    }
}

/// Returns a row for every figure: as it was measured, or else as the README has it.
fn rows(figures: &Figures, readme: &str) -> String {
    let row = |goal: &shared::goals::Goal| {
        let begins = format!("| `{}` | {} |", goal.name, goal.what);
        let measured = figures.get(goal.name);
        let measured = measured.map(|(value, of)| format!(" {} | {of} |", goal.value(*value)));
        let before = readme.lines().find_map(|line| line.strip_prefix(&*begins));
        let measured = measured.as_deref().or(before);
        format!("{begins}{}\n", measured.unwrap_or(" not measured | |"))
    };
    GOALS.iter().map(row).collect()
}
