//! Macro that defines a symbol table. An entry has the syntax `field: "HIP name" "CUDA name" (arguments) [->
//! result];`.
//!
//! An entry in the `optional` block is `None` if the opened version of the library lacks the function. An
//! empty name means that the API has no such function.

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
            /// GPU API that the library exports.
            pub api: $crate::GpuApi,
            /// Path or file name with which the library was opened.
            pub library: std::path::PathBuf,
            $( $(#[$entry])* pub $field: unsafe extern "C" fn($($arg),*) -> $crate::DriverStatus, )*
            $( $(#[$extra])* pub $option: Option<unsafe extern "C" fn($($option_arg),*) $(-> $ret)?>, )*
        }

        impl $name {
            /// Opens the first path of `search` at which the library can be loaded. The library is never
            /// closed.
            pub fn open(
                api: $crate::GpuApi,
                search: &$crate::LibrarySearchPaths,
            ) -> Result<Self, $crate::LibraryOpenError> {
                let (library, found) = $crate::library::open(search)?;
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                // SAFETY: each entry was compared with the vendor's header, and its type has the same ABI.
                // The library is never closed, so the function pointers stay valid.
                unsafe {
                    Ok(Self {
                        api,
                        $( $field: $crate::library::symbol(library, &found, api.pick($hip, $cuda))?, )*
                        $( $option: $crate::library::optional(library, api.pick($hip_option, $cuda_option)), )*
                        library: found,
                    })
                }
            }

            /// Returns the symbol names of all required entries, for tests that inspect a library file
            /// without opening it.
            #[must_use]
            pub fn names(api: $crate::GpuApi) -> Vec<&'static str> {
                vec![$( api.pick($hip, $cuda), )*]
            }
        }
    };
}
pub(crate) use table;
