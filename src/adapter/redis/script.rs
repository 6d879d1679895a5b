//! [`Script`]: a Lua script, and [`ScriptCall`]: one call of it over one key.

use redis::{Arg, Cmd, ToRedisArgs};

/// A Lua script of this crate. Every script reads and writes one key.
#[derive(Debug)]
pub(super) struct Script {
    /// Begins with `#!lua`, and with the script's flags. Needs a server from 7.0 on, which refuses it at
    /// once if the server is a replica.
    flagged: Text,
    /// Without that line, for servers before 7.0.
    plain: Text,
}

#[derive(Debug)]
struct Text {
    lua: String,
    sha1: String,
}

impl Text {
    fn new(lua: String) -> Self {
        let sha1 = redis::Script::new(&lua).get_hash().to_owned();
        Self { lua, sha1 }
    }
}

impl Script {
    /// `flags` are the script's flags: `""`, or `" flags=allow-oom"`.
    pub(super) fn new(lua: &str, flags: &str) -> Self {
        let flagged = Text::new(format!("#!lua{flags}\n{lua}"));
        Self { flagged, plain: Text::new(lua.to_owned()) }
    }
}

/// How a call is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// The server knows flags of scripts: it is of version 7.0 or later.
    pub(super) knows_flags: bool,
    /// The script writes the value also if it changes nothing, unless it refuses the call. `WAIT` waits
    /// for writes of its own connection only: the first write may have been on another one.
    pub(super) force_write: bool,
}

/// One call of a script. Repeated as it is, it has the same effect.
#[derive(Debug, Clone)]
pub(super) struct ScriptCall {
    script: &'static Script,
    key: Vec<u8>,
    args: Cmd,
}

impl ScriptCall {
    /// `key` is the key of Redis.
    pub(super) fn new(script: &'static Script, key: Vec<u8>) -> Self {
        Self { script, key, args: Cmd::new() }
    }

    /// Adds an argument: the script's `ARGV[2]` and so on. `ARGV[1]` is `1` for
    /// [`force_write`](Form::force_write), else `0`.
    pub(super) fn arg(mut self, arg: impl ToRedisArgs) -> Self {
        self.args.arg(arg);
        self
    }

    /// Returns the key of Redis that the script reads and writes.
    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the call by the script's hash.
    pub(super) fn by_hash(&self, form: Form) -> Cmd {
        self.command("EVALSHA", &self.text(form).sha1, form)
    }

    /// Returns the call with the script's text, for a server that does not know the hash.
    pub(super) fn by_text(&self, form: Form) -> Cmd {
        self.command("EVAL", &self.text(form).lua, form)
    }

    fn text(&self, form: Form) -> &'static Text {
        if form.knows_flags { &self.script.flagged } else { &self.script.plain }
    }

    fn command(&self, name: &str, script: &str, form: Form) -> Cmd {
        let mut command = Cmd::new();
        command.arg(name).arg(script).arg(1).arg(&self.key).arg(u8::from(form.force_write));
        for arg in self.args.args_iter() {
            if let Arg::Simple(arg) = arg {
                command.arg(arg);
            }
        }
        command
    }
}
