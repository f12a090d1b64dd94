//! What a process may use, what it used, and what ended it (**extension** `processLimits`).

use serde::{Deserialize, Serialize};

/// Declares the resources: variant, member, unit of its numbers.
macro_rules! resources {
    ($($(#[$doc:meta])* $variant:ident $member:ident $json:literal;)*) => {
        /// Something that a limit can be set on.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Resource {
            $($(#[$doc])* $variant,)*
        }

        impl Resource {
            /// All of them, in the order of the wire.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The member of `limits`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $json,)*
                }
            }
        }

        /// One optional value per resource.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, bound(deserialize = "T: Deserialize<'de>"))]
        pub struct PerResource<T> {
            $($(#[$doc])*
            #[serde(rename = $json, skip_serializing_if = "Option::is_none")]
            pub $member: Option<T>,)*
        }

        // Not derived: that would ask for a default of `T`.
        impl<T> Default for PerResource<T> {
            fn default() -> Self {
                Self { $($member: None,)* }
            }
        }

        impl<T: Copy> PerResource<T> {
            /// The value of a resource.
            pub fn get(&self, resource: Resource) -> Option<T> {
                match resource {
                    $(Resource::$variant => self.$member,)*
                }
            }

            /// Sets the value of a resource.
            pub fn set(&mut self, resource: Resource, value: Option<T>) {
                match resource {
                    $(Resource::$variant => self.$member = value,)*
                }
            }
        }

        /// [`ResourceLimits`] of a request: an unknown member is an error, because the client relies on it.
        #[derive(Deserialize)]
        #[cfg_attr(
            feature = "schema",
            derive(schemars::JsonSchema),
            schemars(rename = "ResourceLimits", description = "The largest amounts that a process may use.")
        )]
        #[serde(deny_unknown_fields)]
        pub(crate) struct Requested {
            $($(#[$doc])*
            #[serde(default, rename = $json)]
            $member: Option<u64>,)*
        }

        /// The schema of [`AppliedLimits`].
        #[cfg(feature = "schema")]
        #[derive(schemars::JsonSchema)]
        #[schemars(rename = "AppliedLimits", description = "The limits in force, each with what enforces it.")]
        struct Applied {
            $($(#[$doc])*
            #[schemars(rename = $json)]
            #[expect(dead_code, reason = "only its schema is used")]
            $member: Option<AppliedLimit>,)*
        }

        impl From<Requested> for ResourceLimits {
            fn from(requested: Requested) -> Self {
                Self { $($member: requested.$member,)* }
            }
        }
    };
}

resources! {
    /// Time since the start, in milliseconds.
    Wall wall_ms "wallMs";
    /// Time without output and without input, in milliseconds.
    Idle idle_ms "idleMs";
    /// CPU time of the process and all its descendants, in milliseconds.
    Cpu cpu_ms "cpuMs";
    /// CPUs that they may use at once, in thousandths.
    Cpus cpus_milli "cpusMilli";
    /// Memory that they may have at once, in bytes.
    Memory memory_bytes "memoryBytes";
    /// Processes that may exist at once, the first one included.
    Pids pids "pids";
    /// Open files of each process.
    OpenFiles open_files "openFiles";
    /// Output to stdout and stderr together, or to the terminal, in bytes.
    Output output_bytes "outputBytes";
    /// Bytes that they may write to disks.
    Disk disk_bytes "diskBytes";
}

/// The largest amounts that a process may use.
pub type ResourceLimits = PerResource<u64>;

/// Gives each use of [`PerResource`] its own name in the schema.
#[cfg(feature = "schema")]
macro_rules! schema_of {
    ($($limits:ty => $like:ty;)*) => {$(
        impl schemars::JsonSchema for $limits {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                <$like>::schema_name()
            }

            fn schema_id() -> std::borrow::Cow<'static, str> {
                <$like>::schema_id()
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                <$like>::json_schema(generator)
            }
        }
    )*};
}

#[cfg(feature = "schema")]
schema_of! {
    ResourceLimits => Requested;
    AppliedLimits => Applied;
}

/// The limits in force, each with what enforces it.
pub type AppliedLimits = PerResource<AppliedLimit>;

impl<T: Copy> PerResource<T> {
    /// Whether no resource has a value.
    pub fn is_empty(&self) -> bool {
        Resource::ALL.iter().all(|&resource| self.get(resource).is_none())
    }

    /// The resources with a value, and their values.
    pub fn iter(&self) -> impl Iterator<Item = (Resource, T)> {
        Resource::ALL.iter().filter_map(|&resource| Some((resource, self.get(resource)?)))
    }
}

/// A limit in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AppliedLimit {
    /// The largest amount, in the unit of the resource.
    pub value: u64,
    /// What enforces it.
    pub by: LimitMechanism,
}

/// What enforces a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_enum))]
pub enum LimitMechanism {
    /// The server itself: it sees the time and the output.
    Server,
    /// A control group: exact, and nothing escapes it.
    Cgroup,
    /// A resource limit of the kernel, per process.
    Rlimit,
    /// The server looks at `/proc` several times a second; short peaks may pass.
    Watchdog,
    /// A mechanism that this version does not know.
    #[serde(other)]
    Other,
}

/// Why a process ended, if it did not exit by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_enum))]
pub enum EndedBy {
    /// It used more than `memoryBytes`.
    Oom,
    /// It ran longer than `wallMs`.
    Wall,
    /// It neither wrote nor received anything for `idleMs`.
    Idle,
    /// It used more than `cpuMs`.
    Cpu,
    /// It started more than `pids` processes.
    Pids,
    /// It wrote more than `outputBytes`.
    Output,
    /// It wrote more than `diskBytes` to disks.
    Disk,
    /// Any other signal killed it.
    Signal,
    /// `process/terminate` killed it.
    Terminate,
    /// The server ended it because it stops.
    Server,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

impl EndedBy {
    /// The limit that was exceeded, if it was one.
    pub fn resource(self) -> Option<Resource> {
        Some(match self {
            Self::Oom => Resource::Memory,
            Self::Wall => Resource::Wall,
            Self::Idle => Resource::Idle,
            Self::Cpu => Resource::Cpu,
            Self::Pids => Resource::Pids,
            Self::Output => Resource::Output,
            Self::Disk => Resource::Disk,
            Self::Signal | Self::Terminate | Self::Server | Self::Other => return None,
        })
    }

    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Oom => "oom",
            Self::Wall => "wall",
            Self::Idle => "idle",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::Output => "output",
            Self::Disk => "disk",
            Self::Signal => "signal",
            Self::Terminate => "terminate",
            Self::Server => "server",
            Self::Other => "other",
        }
    }
}

/// What a process and its descendants used until its exit; descendants that still run are counted only if
/// a limit had them watched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    /// CPU time, in microseconds.
    pub cpu_us: u64,
    /// The most memory at once, in bytes: of all together if a limit had them watched, else of the largest
    /// process, if that was larger than the server's own helper processes (a few MiB).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// Bytes read from disks.
    pub read_bytes: u64,
    /// Bytes written to disks.
    pub written_bytes: u64,
}

/// Reads the limits of a request.
pub(crate) fn requested<'de, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<ResourceLimits>, D::Error> {
    Ok(Option::<Requested>::deserialize(from)?.map(Into::into))
}
