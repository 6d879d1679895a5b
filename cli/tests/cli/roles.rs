//! The rights that the commands need on Postgres.

use tower_dedup::adapter;

use crate::command::{execute, run};
use support::postgres::Schema;
use support::{complete_all, dedup_key, terms};

/// A role of one test, with a password that its URL has.
pub(crate) struct Role {
    pub(crate) schema: Schema,
    pub(crate) name: String,
}

impl Role {
    /// Makes the table in a fresh schema, and a role without rights.
    pub(crate) async fn fresh() -> Self {
        let schema = Schema::fresh();
        run(&schema.url(), &["migrate"]).await.assert(0, "made");
        let name = format!("tower_dedup_role_{:016x}", rand::random::<u64>());
        let role = Self { schema, name };
        let Self { name, .. } = &role;
        role.admin(&format!("CREATE ROLE {name} LOGIN PASSWORD 'pw'")).await;
        role
    }

    /// Grants what the guide lists, with these rights on the table.
    pub(crate) async fn grant(&self, rights: &str) {
        let (schema, name) = (self.schema.name(), &self.name);
        self.admin(&format!(
            "GRANT USAGE ON SCHEMA {schema} TO {name};
             GRANT {rights} ON {schema}.webhook_deliveries TO {name};
             GRANT SELECT ON {schema}.webhook_deliveries_schema TO {name}"
        ))
        .await;
    }

    /// Runs statements as the owner of the schema.
    pub(crate) async fn admin(&self, sql: &str) {
        execute(&self.schema.url(), sql).await;
    }

    pub(crate) fn url(&self) -> String {
        let url = self.schema.url();
        let (scheme, rest) = url.split_once("://").unwrap();
        let rest = rest.split_once('@').map_or(rest, |(_, rest)| rest);
        format!("{scheme}://{}:pw@{rest}", self.name)
    }

    pub(crate) async fn remove(self) {
        let name = &self.name;
        self.admin(&format!("DROP OWNED BY {name}; DROP ROLE {name}")).await;
    }
}

#[tokio::test]
async fn commands_that_read_need_select_and_those_that_repair_the_rights_of_the_service() {
    let role = Role::fresh().await;
    let adapter = adapter::connect(&role.schema.url()).await.unwrap();
    let keys = ["a", "b", "old"].map(dedup_key);
    complete_all(&*adapter, &keys, &terms()).await.unwrap();
    let expired = "UPDATE webhook_deliveries SET expires_at = now() - interval '2 h'";
    role.admin(&format!("{expired} WHERE id = 'old'")).await;
    role.grant("SELECT").await;
    let url = role.url();
    for (args, code, words) in [
        (&["get", "test", "a"][..], 0, "complete"),
        (&["list"], 0, "complete"),
        (&["missed", "test"], 0, "ids 0"),
        (&["stats"], 0, "rows                    3\n"),
        (&["migrate", "--check"], 0, "current"),
        (&["migrate"], 0, "current"),
        (&["doctor"], 1, "the role lacks INSERT, UPDATE"),
        (&["forget", "test", "a", "--yes"], 4, "permission denied"),
        (&["purge"], 4, "permission denied"),
    ] {
        run(&url, args).await.assert(code, words);
    }
    role.grant("INSERT, UPDATE, DELETE").await;
    run(&url, &["forget", "test", "a", "--yes"]).await.assert(0, "forgotten");
    run(&url, &["purge"]).await.assert(0, "purged  1");
    role.remove().await;
}
