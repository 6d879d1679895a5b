//! The table.

use std::fmt::Write;

use chrono::Utc;

use crate::log::Kind;
use crate::row::Row;
use crate::run::{Plan, Report};

/// Returns the table in Markdown, with the machine and the date.
pub(crate) fn markdown(reports: &[(Row, Result<Report, String>)], plan: Plan) -> String {
    let mut text = String::new();
    if let Some((row, Ok(report))) = reports.iter().find(|(_, report)| report.is_ok()) {
        let names = cells(*row, report).map(|(name, _)| name);
        text = format!("| {} |\n|{}\n", names.join(" | "), "---|".repeat(names.len()));
    }
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
    format!("| {} |", cells(row, report).map(|(_, cell)| cell).join(" | "))
}

/// Returns the cells of one row, with the head of each column.
fn cells(row: Row, report: &Report) -> [(&'static str, String); 17] {
    let Report { verdict, faults, .. } = report;
    let faults = |kind| faults.count(kind).to_string();
    [
        ("store", row.store_name().to_owned()),
        ("ledger", row.ledger_name().to_owned()),
        ("deliveries", grouped(report.deliveries)),
        ("events", grouped(report.events as u64)),
        ("kills", report.faults.deaths.len().to_string()),
        ("restarts of the store", faults(Kind::Restart)),
        ("failovers", faults(Kind::Failover)),
        ("backends killed", faults(Kind::Backend)),
        ("silent connections", faults(Kind::Silence)),
        ("write locks held", faults(Kind::WriteLock)),
        ("hang-ups", grouped(report.hang_ups)),
        ("hostile requests", grouped(report.hostile)),
        ("lost", verdict.lost.to_string()),
        ("lost, explained", verdict.lost_explained.to_string()),
        ("doubled", verdict.doubled.to_string()),
        ("doubled, explained", verdict.doubled_explained.to_string()),
        ("seconds", report.time.as_secs().to_string()),
    ]
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
