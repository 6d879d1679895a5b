//! `doctor`: eleven checks, each of which finds a mistake that loses events, runs them twice or refuses them. A
//! check reports the first fault that exists.

mod finding;
mod postgres;
mod redis;
mod sqlite;

use crate::failure::Failure;
use crate::output::{Output, table, write, write_json};
use crate::store::Target;
use finding::{Finding, Level};

/// Returns `false` if a finding is an error.
pub(crate) async fn doctor(target: &Target, output: Output) -> Result<bool, Failure> {
    let findings = match target {
        Target::Postgres(postgres) => postgres::findings(target, postgres).await?,
        Target::Sqlite(sqlite) => sqlite::findings(target, sqlite).await?,
        Target::Redis(redis) => redis::findings(redis).await?,
        Target::Own(_) => return Err(Failure::own_store()),
    };
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    if output.json {
        for finding in &findings {
            write_json(finding)?;
        }
    } else {
        let lines = table(findings.iter().flat_map(Finding::rows));
        write(&format!("{lines}\n{errors} error(s), {warnings} warning(s)"))?;
    }
    Ok(errors == 0)
}
