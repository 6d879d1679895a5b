//! Writes the figures of the last run into one table and one plot.
//!
//! `cargo bench --bench table` prints the table and nothing else to stdout, and writes the plot to `ratios.svg` in
//! the target folder. With `-- --readme`, it writes the table into `README.md` and the plot beside this file. So
//! this command measures everything and updates `benches/README.md`:
//!
//! ```console
//! $ cargo bench && cargo bench --bench table -- --readme
//! ```
//!
//! Under `cargo test`, it checks that the README has a row for every goal, with the same text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

#[path = "shared/mod.rs"]
mod shared;

use shared::goals::{Bound, GOALS, Goal};
use shared::ratios;
use shared::run::Run;

/// The README's lines before and after the generated section.
const BEGIN: &str = "<!-- `cargo bench --bench table -- --readme` writes what follows. -->\n";
const END: &str = "<!-- Up to here. -->\n";
const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
/// How the sentence on the machine begins.
const MACHINE: &str = "Callers, servers and PostgreSQL shared";
const PLOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/ratios.svg");

fn main() {
    let run = Run::from_args_with(&["--readme"]);
    if run.is_test() {
        check(&fs::read_to_string(README).expect("the README"));
        return;
    }
    let figures = ratios::read(&ratios::file());
    let table = table(&figures);
    print!("\n{table}");
    if std::env::args().any(|arg| arg == "--readme") {
        let text = fs::read_to_string(README).expect("the README");
        let (before, _, after) = parts(&text);
        let machine = if figures.is_empty() { String::new() } else { machine() };
        let section = format!("{BEGIN}\n{table}\n{machine}{END}");
        fs::write(README, format!("{before}{section}{after}")).expect("the README");
        fs::write(PLOT, svg(&figures)).expect("the plot");
        eprintln!("\nwritten: {README}, {PLOT}");
    } else {
        let plot = ratios::target().join("ratios.svg");
        fs::write(&plot, svg(&figures)).expect("the plot");
        eprintln!("\nthe plot: {}", plot.display());
    }
}

/// Splits the README into the text before the section, the section, and the text after it.
fn parts(readme: &str) -> (&str, &str, &str) {
    let lines = "the README has the two lines around the table";
    let (before, rest) = readme.split_once(BEGIN).expect(lines);
    let (section, after) = rest.split_once(END).expect(lines);
    (before, section, after)
}

fn check(readme: &str) {
    let (_, section, _) = parts(readme);
    let is_written =
        |line: &&str| line.is_empty() || line.starts_with('|') || line.starts_with(MACHINE);
    let other: Vec<&str> = section.lines().filter(|line| !is_written(line)).collect();
    assert!(other.is_empty(), "the section has the table and the machine only: {other:?}");
    let lines: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(lines.len(), GOALS.len(), "the README has a row for every goal");
    for (goal, line) in GOALS.iter().zip(lines) {
        let expected = format!("| `{}` | {} | {} | ", goal.name, goal.what, goal.goal());
        assert!(line.starts_with(&expected), "`{line}` does not begin as `{expected}`");
    }
    // The plot of two figures, of which one has a goal, has one bar.
    let figures = [("layer_ns".to_owned(), 900.0), ("sync_us".to_owned(), 100.0)];
    let drawn = svg(&BTreeMap::from(figures));
    assert_eq!(drawn.matches("<rect ").count(), 2, "a background and one bar");
    let goals = GOALS.iter().filter(|goal| goal.bound != Bound::NoGoal).count();
    assert_eq!(drawn.matches("not measured").count(), goals - 1);
    assert!(!drawn.contains("sync_us"));
}

fn table(figures: &BTreeMap<String, f64>) -> String {
    let mut table = "| figure | what over what | goal | measured |\n|---|---|---|---|\n".to_owned();
    for goal in GOALS {
        let measured = match figures.get(goal.name) {
            Some(value) if goal.verdict(*value) == "missed" => {
                format!("{}, missed", goal.value(*value))
            }
            Some(value) => goal.value(*value),
            None => "not measured".to_owned(),
        };
        writeln!(table, "| `{}` | {} | {} | {measured} |", goal.name, goal.what, goal.goal())
            .expect("a string");
    }
    table
}

/// Returns a sentence on the machine, as far as this process knows it.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let model = fs::read_to_string("/proc/cpuinfo").ok().and_then(|info| {
        let line = info.lines().find_map(|line| line.strip_prefix("model name"))?;
        Some(format!(" of {}", line.trim_start_matches([' ', '\t', ':']).trim()))
    });
    let (system, model) = (std::env::consts::OS, model.unwrap_or_default());
    format!("{MACHINE} {cores} cores{model} ({system}).\n\n")
}

// The plot has one bar per figure that has a goal. The bar goes from the goal to the right if the figure is better, and to
// the left if it is worse. The scale is logarithmic: half as good is as far from the goal as twice as good.

const WIDTH: f64 = 820.0;
const LEFT: f64 = 200.0;
const RIGHT: f64 = 620.0;
const TOP: f64 = 48.0;
const STEP: f64 = 26.0;
/// The number of powers of two on each side of the goal.
const RANGE: i32 = 4;

fn x(reached: f64) -> f64 {
    let range = f64::from(RANGE);
    let fraction = (reached.log2().clamp(-range, range) + range) / (2.0 * range);
    LEFT + fraction * (RIGHT - LEFT)
}

fn svg(figures: &BTreeMap<String, f64>) -> String {
    let mut lines = String::new();
    let mut top = TOP;
    for goal in GOALS.iter().filter(|goal| goal.bound != Bound::NoGoal) {
        lines.push_str(&bar(goal, figures.get(goal.name).copied(), top));
        top += STEP;
    }
    let height = top + 12.0;
    let mut grid = String::new();
    for power in -RANGE..=RANGE {
        let (at, label) = (x(f64::from(power).exp2()), label(power));
        let color = if power == 0 { "#333" } else { "#ddd" };
        writeln!(
            grid,
            "<line x1=\"{at:.1}\" y1=\"34\" x2=\"{at:.1}\" y2=\"{top}\" stroke=\"{color}\"/>\n\
             <text x=\"{at:.1}\" y=\"26\" text-anchor=\"middle\" fill=\"#555\">{label}</text>"
        )
        .expect("a string");
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>Figures against their goals</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n{grid}{lines}</svg>\n"
    )
}

fn label(power: i32) -> String {
    match power {
        0 => "goal".to_owned(),
        1.. => format!("{}×", 1 << power),
        _ => format!("1/{}", 1 << -power),
    }
}

fn bar(goal: &Goal, value: Option<f64>, top: f64) -> String {
    let middle = top + 4.0;
    let name = format!(
        "<text x=\"{:.1}\" y=\"{middle}\" text-anchor=\"end\">{}</text>\n",
        LEFT - 8.0,
        goal.name
    );
    let (bar, text) = match value {
        None => (String::new(), "not measured".to_owned()),
        Some(value) => {
            let (goal_at, end) = (x(1.0), x(goal.reached(value).expect("a goal")));
            let color = if goal.verdict(value) == "met" { "#2a9d5c" } else { "#d1495b" };
            // The minimum width shows a goal that is met exactly.
            let (from, width, y) = (end.min(goal_at), (end - goal_at).abs().max(2.0), top - 8.0);
            let bar = format!(
                "<rect x=\"{from:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"16\" \
                 fill=\"{color}\"/>\n"
            );
            (bar, format!("{} ({})", goal.value(value), goal.goal()))
        }
    };
    let at = RIGHT + 8.0;
    format!("{bar}{name}<text x=\"{at}\" y=\"{middle}\">{text}</text>\n")
}
