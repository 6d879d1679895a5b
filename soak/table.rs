//! The table.

use std::fmt::Write;

use chrono::Utc;

use crate::row::{Plan, Report, Row};

/// The head of the table.
const HEAD: [&str; 17] = [
    "store",
    "ledger",
    "deliveries",
    "events",
    "kills",
    "restarts of the store",
    "failovers",
    "backends killed",
    "silent connections",
    "write locks held",
    "hang-ups",
    "hostile requests",
    "lost",
    "lost, explained",
    "doubled",
    "doubled, explained",
    "seconds",
];

/// Returns the table in Markdown, with the machine and the date.
pub(crate) fn markdown(reports: &[(Row, Result<Report, String>)], plan: Plan) -> String {
    let mut text = format!("| {} |\n|{}\n", HEAD.join(" | "), "---|".repeat(HEAD.len()));
    let mut versions: Vec<&str> = Vec::new();
    for (row, report) in reports {
        let Ok(report) = report else {
            let (store, ledger) = (row.store_name(), row.ledger_name());
            let _ = writeln!(text, "| {store} | {ledger} | did not end |");
            continue;
        };
        let _ = writeln!(text, "{}", line(*row, report));
        if !versions.contains(&&*report.version) {
            versions.push(&report.version);
        }
    }
    let _ = write!(
        text,
        "\nMachine: {}. {}. Date: {}. Seed: {}.",
        machine(),
        versions.join(", "),
        Utc::now().format("%Y-%m-%d"),
        plan.seed
    );
    text
}

/// Returns the line of one row.
pub(crate) fn line(row: Row, report: &Report) -> String {
    let verdict = &report.verdict;
    let cells = [
        row.store_name().to_owned(),
        row.ledger_name().to_owned(),
        grouped(report.deliveries),
        grouped(report.events as u64),
        report.kills.to_string(),
        report.restarts.to_string(),
        report.failovers.to_string(),
        report.backends.to_string(),
        report.silences.to_string(),
        report.write_locks.to_string(),
        grouped(report.hang_ups),
        grouped(report.hostile),
        verdict.lost.to_string(),
        verdict.lost_explained.to_string(),
        verdict.doubled.to_string(),
        verdict.doubled_explained.to_string(),
        report.time.as_secs().to_string(),
    ];
    format!("| {} |", cells.join(" | "))
}

/// Returns the number with commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.split_once(':'));
        value.map(|value| value.1.trim().to_owned())
    };
    let model = field("/proc/cpuinfo", "model name");
    let memory = field("/proc/meminfo", "MemTotal").unwrap_or_default();
    let memory = memory.split(' ').next().and_then(|kb| kb.parse::<u64>().ok());
    format!(
        "{cores} cores{}{}, {} {}",
        model.map_or_else(String::new, |model| format!(" ({model})")),
        memory.map_or_else(String::new, |kb| format!(", {} GB", kb / 1_000_000)),
        std::env::consts::OS,
        std::env::consts::ARCH
    )
}
