//! The macro behind every table: `field: "hip name" "cu name" (arguments) [-> result];`.
//!
//! Entries behind `optional` are `None` where the library, or its version, has no such function; an
//! empty name says that the vendor has none.

macro_rules! table {
    (
        $(#[$doc:meta])* $name:ident {
            $( $(#[$entry:meta])* $field:ident: $hip:literal $cuda:literal ($($arg:ty),* $(,)?); )*
        }
        optional {
            $( $(#[$extra:meta])* $option:ident: $hip_option:literal $cuda_option:literal
                ($($option_arg:ty),* $(,)?) $(-> $ret:ty)?; )*
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            /// Whose names the library exports.
            pub api: $crate::GpuApi,
            /// The name under which the library was found.
            pub library: std::path::PathBuf,
            $( $(#[$entry])* pub $field: unsafe extern "C" fn($($arg),*) -> $crate::DriverStatus, )*
            $( $(#[$extra])* pub $option: Option<unsafe extern "C" fn($($option_arg),*) $(-> $ret)?>, )*
        }

        impl $name {
            /// Opens the first library of `search` that can be opened; it stays open for good.
            pub fn open(
                api: $crate::GpuApi,
                search: &$crate::LibrarySearch,
            ) -> Result<Self, $crate::LibraryOpenError> {
                let (library, found) = $crate::library::open(search)?;
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                // SAFETY: the types are those of the vendor's headers at register level, compared entry
                // by entry; the library is never closed, so the pointers stay valid.
                unsafe {
                    Ok(Self {
                        api,
                        $( $field: $crate::library::symbol(library, &found, api.pick($hip, $cuda))?, )*
                        $( $option: $crate::library::optional(library, api.pick($hip_option, $cuda_option)), )*
                        library: found,
                    })
                }
            }

            /// Names of all required entries, for tests that look at a library without opening it.
            #[must_use]
            pub fn names(api: $crate::GpuApi) -> Vec<&'static str> {
                vec![$( api.pick($hip, $cuda), )*]
            }
        }
    };
}
pub(crate) use table;
