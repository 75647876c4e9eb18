"""`python -m services.migrator`"""

from paceline.service import main
from services.migrator.migrator import body

if __name__ == "__main__":
    main("migrator", body)
