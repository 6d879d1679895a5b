//! `doctor`: facts are gathered ([`postgres`], [`sqlite`], [`redis`]), then judged ([`judge_postgres`],
//! [`judge_sqlite`], [`judge_redis`]).

mod finding;
mod judge_postgres;
mod judge_redis;
mod judge_sqlite;
mod postgres;
mod redis;
mod sqlite;

use crate::failure::Failure;
use crate::options::Doctor;
use crate::output::Output;
use crate::store::Target;
use finding::Level;

/// Returns `false` if a finding is an error.
pub(crate) async fn doctor(
    target: &Target,
    options: &Doctor,
    output: Output,
) -> Result<bool, Failure> {
    let findings = match target {
        Target::Postgres(postgres) => {
            judge_postgres::judge(&postgres::gather(postgres).await?, options)
        }
        Target::Sqlite(sqlite) => judge_sqlite::judge(&sqlite::gather(sqlite).await?),
        Target::Redis(redis) => judge_redis::judge(&redis::gather(redis).await?),
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
