//! `doctor`: nine checks, each of which finds a mistake that loses events, runs them twice or refuses them. A
//! check reports the first fault that exists.

mod finding;
mod postgres;
mod redis;
mod sqlite;

use crate::failure::Failure;
use crate::output::{Output, table, write};
use crate::store::Known;
use finding::{Finding, Level};

/// Returns `false` if a finding is an error.
pub(crate) async fn doctor(target: &Known, output: Output) -> Result<bool, Failure> {
    let findings = match target {
        Known::Postgres(postgres) => postgres::findings(postgres).await?,
        Known::Sqlite(sqlite) => sqlite::findings(sqlite).await?,
        Known::Redis(redis) => redis::findings(redis).await?,
    };
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    if output.json {
        for finding in &findings {
            output.print(finding)?;
        }
    } else {
        let lines = table(findings.iter().flat_map(Finding::rows));
        write(&format!("{lines}\n{errors} error(s), {warnings} warning(s)"))?;
    }
    Ok(errors == 0)
}
