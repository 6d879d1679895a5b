//! `doctor`: eight checks, each of which finds a mistake that loses events, runs them twice or refuses them. A
//! check is a table of faults ([`finding::Fault`]); the first that exists is reported.

mod finding;
mod postgres;
mod redis;
mod sqlite;

use crate::failure::Failure;
use crate::output::Output;
use crate::store::Target;
use finding::Level;

/// Returns `false` if a finding is an error.
pub(crate) async fn doctor(target: &Target, output: Output) -> Result<bool, Failure> {
    let findings = match target {
        Target::Postgres(postgres) => postgres::findings(postgres).await?,
        Target::Sqlite(sqlite) => sqlite::findings(sqlite).await?,
        Target::Redis(redis) => redis::findings(redis).await?,
    };
    for finding in &findings {
        output.print(finding, || finding.text())?;
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    if !output.json {
        output.print(&(), || format!("{errors} error(s), {warnings} warning(s)"))?;
    }
    Ok(errors == 0)
}
