# Makes the llama.cpp build small: 122 instead of 328 CPU seconds, with the same decoding speed (docs/benchmarks.md).
# Passed as CMAKE_PROJECT_INCLUDE, so it runs at every project() call; nothing of llama.cpp is patched.
if(NOT PROJECT_NAME STREQUAL "llama_cpp")
  return()
endif()

# The bindings force the cache entry ON; a normal variable of that name comes first. `common` is what the command-line
# tools share (argument parsing, downloads, chat parsing, an HTTP server): two thirds of the compile time, never loaded.
set(LLAMA_BUILD_COMMON OFF)

# The arithmetic is in ggml and stays at -O3. libllama builds graphs and tokenizes; the files of the 190 model
# architectures run once per graph.
function(paceline_lighten)
  target_compile_options(llama PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  get_target_property(sources llama SOURCES)
  list(FILTER sources EXCLUDE REGEX "models/|\\.h$")
  set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES COMPILE_OPTIONS -O2)
endfunction()
cmake_language(DEFER CALL paceline_lighten)
